// What of loss scaling does not depend on ranks: growing, backing off, saving, dtypes, misuse.
#include <fsdp/grad_scaler.h>

#include "support/errors.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

constexpr double kOverflow = std::numeric_limits<double>::infinity();

// OneParameter process, one parameter.
struct OneParameter {
  explicit OneParameter(const GradScalerOptions& options = {}) : scaler(options) {}
  bool step(double grad) {
    parameter.mutable_grad() = torch::full({1}, grad);
    const bool stepped = scaler.step(optimizer);
    scaler.update();
    return stepped;
  }
  at::Tensor parameter = torch::ones({1}, torch::requires_grad());
  torch::optim::SGD optimizer{{parameter}, torch::optim::SGDOptions(1.0)};
  GradScaler scaler;
};

TEST(GradScalerAlone, GrowsAfterTheIntervalAndBacksOffAtOnce) {
  OneParameter one({.init_scale = 8.0, .growth_factor = 4.0, .backoff_factor = 0.25, .growth_interval = 3});
  std::ignore = one.scaler.scale(torch::ones({}));
  std::vector<double> scales;
  for (const double grad : {1.0, 1.0, kOverflow, 1.0, 1.0, 1.0, 1.0}) {
    EXPECT_EQ(one.step(grad), grad == 1.0);
    scales.push_back(one.scaler.get_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{8, 8, 2, 2, 2, 8, 8}));
  EXPECT_EQ(one.scaler.state().growth_tracker, 1);
}

TEST(GradScalerAlone, StateIsSavedAndLoaded) {
  OneParameter one({.init_scale = 8.0, .growth_interval = 3}), other;
  std::ignore = one.scaler.scale(torch::ones({}));
  EXPECT_TRUE(one.step(1.0));
  EXPECT_TRUE(one.step(1.0));
  other.scaler.load_state(one.scaler.state());
  EXPECT_EQ(other.scaler.get_scale(), 8.0);
  std::ignore = other.scaler.scale(torch::ones({}));
  EXPECT_TRUE(other.step(1.0));
  EXPECT_EQ(other.scaler.get_scale(), 16.0) << "the third step in a row";
  EXPECT_CONTAINS(error_of<c10::ValueError>([&] { other.scaler.load_state({}); }), "disabled");
}

TEST(GradScalerAlone, Disabled) {
  OneParameter one({.init_scale = -1.0, .enabled = false});
  const auto loss = torch::ones({});
  EXPECT_TRUE(one.scaler.scale(loss).is_same(loss));
  EXPECT_TRUE(one.step(kOverflow)) << "steps without looking";
  one.scaler.unscale_(one.optimizer);
  one.scaler.unscale_(one.optimizer);
  one.scaler.load_state({.scale = 4.0});
  EXPECT_EQ(one.scaler.get_scale(), 1.0);
  EXPECT_EQ(one.scaler.state().scale, 0.0);
}

TEST(GradScalerAlone, ScalesOneLossOrSeveral) {
  GradScaler scaler({.init_scale = 4.0});
  const auto losses = scaler.scale(std::vector<at::Tensor>{torch::ones({}), torch::ones({2}, torch::kDouble)});
  EXPECT_TRUE(torch::equal(losses.at(0), torch::full({}, 4.F)));
  EXPECT_TRUE(torch::equal(losses.at(1), torch::full({2}, 4.0, torch::kDouble)));
}

TEST(GradScalerAlone, GradientsOfSeveralDtypes) {
  GradScaler scaler({.init_scale = 4.0});
  std::ignore = scaler.scale(torch::ones({}));
  std::vector<at::Tensor> parameters;
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    parameters.push_back(torch::ones({2}, torch::dtype(dtype).requires_grad(true)));
    parameters.back().mutable_grad() = torch::full({2}, 8.0, dtype);
  }
  auto embedding = torch::nn::Embedding(torch::nn::EmbeddingOptions(3, 2).sparse(true));
  embedding(torch::tensor({1})).sum().backward();
  parameters.push_back(embedding->weight);
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(1.0));
  scaler.unscale_(optimizer);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(torch::equal(parameters[i].grad(), torch::full_like(parameters[i], 2.0)));
  EXPECT_EQ(embedding->weight.grad().to_dense().sum().item<double>(), 2 * 0.25);
}

TEST(GradScalerAlone, MisuseIsNamed) {
  OneParameter one;
  EXPECT_ERROR(one.scaler.unscale_(one.optimizer), c10::Error, "unscale_() was called before scale()");
  EXPECT_ERROR(one.scaler.step(one.optimizer), c10::Error, "step() was called before scale()");
  std::ignore = one.scaler.scale(torch::ones({}));
  EXPECT_ERROR(one.scaler.update(), c10::Error, "No inf checks were recorded prior to update");
  EXPECT_ERROR(one.scaler.step(one.optimizer), c10::Error, "No inf checks were recorded for this optimizer");
  one.scaler.update(4.0);
  EXPECT_EQ(one.scaler.get_scale(), 4.0);
  one.parameter.mutable_grad() = torch::ones({1});
  EXPECT_TRUE(one.scaler.step(one.optimizer));
  EXPECT_ERROR(one.scaler.unscale_(one.optimizer), c10::Error, "unscale_() is being called after step()");
  for (const double scale : {0.0, -1.0, kOverflow, 1e300}) {
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { one.scaler.update(scale); }), "positive and finite");
  }

  auto half = torch::ones({2}, torch::dtype(torch::kHalf).requires_grad(true));
  half.mutable_grad() = torch::ones({2}, torch::kHalf);
  torch::optim::SGD optimizer({half}, torch::optim::SGDOptions(1.0));
  EXPECT_CONTAINS(error_of<c10::ValueError>([&] { one.scaler.unscale_(optimizer); }), "FP16 gradients");
}

TEST(GradScalerAlone, OptionsOutsideTheirRanges) {
  const auto say = [](const GradScalerOptions& options) {
    return error_of<c10::ValueError>([&] { const GradScaler scaler(options); });
  };
  EXPECT_CONTAINS(say({.init_scale = 0.0}), "the scale is 0");
  EXPECT_CONTAINS(say({.growth_factor = 1.0}), "growth factor must be > 1");
  EXPECT_CONTAINS(say({.backoff_factor = 1.0}), "backoff factor must be between 0 and 1");
  EXPECT_CONTAINS(say({.growth_interval = 0}), "growth interval must be at least 1");
}

}  // namespace
}  // namespace fsdp::testing
