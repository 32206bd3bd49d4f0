// checkpoint() in one process: the gradients of a plain call, from a second run that finds what the first one found.
#include <ATen/autocast_mode.h>
#include <fsdp/activation_checkpoint.h>
#include <fsdp/saved_tensor_hooks.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "support/errors.h"
#include "support/live_bytes.h"
#include "support/nets.h"

namespace fsdp::testing {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor leaf(uint64_t seed, at::IntArrayRef sizes = {4, 6}) {
  return torch::empty(sizes).normal_(0, 1, seeded(seed)).requires_grad_();
}

// tanh saves its result, exp too; the additions save nothing.
struct Counted {
  std::shared_ptr<int> num_starts = std::make_shared<int>(0), num_ends = std::make_shared<int>(0);
  at::Tensor operator()(const at::Tensor& x) const {
    ++*num_starts;
    const auto y = x.tanh().exp();
    ++*num_ends;
    return y + 1;
  }
};

TEST(Checkpoint, RunsOnceMoreAndStopsAtTheLastTensorNeeded) {
  const auto x = leaf(1), expected = leaf(1);
  const Counted counted;
  auto y = checkpoint(counted, x);
  EXPECT_EQ(*counted.num_starts, 1);
  y.sum().backward();
  EXPECT_EQ(*counted.num_starts, 2);
  EXPECT_EQ(*counted.num_ends, 1);
  (expected.tanh().exp() + 1).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), expected.grad()));
}

TEST(Checkpoint, RunsToTheEndWithoutEarlyStop) {
  const Counted counted;
  checkpoint({.early_stop = false}, counted, leaf(1)).sum().backward();
  EXPECT_EQ(*counted.num_starts, 2);
  EXPECT_EQ(*counted.num_ends, 2);
}

TEST(Checkpoint, IsAPlainCallWithoutGraph) {
  const Counted counted;
  const auto x = leaf(1);
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(checkpoint(counted, x).requires_grad());
  }
  {
    const c10::InferenceMode inference;
    EXPECT_FALSE(checkpoint(counted, x).requires_grad());
  }
  EXPECT_EQ(*counted.num_starts, 2);
}

TEST(Checkpoint, ParametersGetGradientsThoughNoArgumentNeedsThem) {
  torch::manual_seed(0);
  torch::nn::Linear layer(6, 3);
  const auto x = leaf(1).detach();
  checkpoint(layer, x).square().sum().backward();
  const auto grad = layer->weight.grad().clone();
  layer->zero_grad();
  layer(x).square().sum().backward();
  EXPECT_TRUE(at::equal(grad, layer->weight.grad()));
}

TEST(Checkpoint, ModulePointersAreKeptAlive) {
  const auto x = leaf(1);
  auto net = std::make_shared<TanhLinear>(6);
  const auto expected = torch::autograd::grad({net->forward(x).sum()}, {x})[0];
  const auto y = checkpoint(net, x);
  net.reset();
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), expected));
}

TEST(Checkpoint, CallsMemberFunctions) {
  const auto net = std::make_shared<TanhLinear>(6);
  const auto x = leaf(1);
  const auto expected = torch::autograd::grad({net->forward(x).sum()}, {x})[0];
  checkpoint(&TanhLinear::forward, net, x).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), expected));
}

TEST(Checkpoint, DrawsTheSameMaskAgain) {
  torch::manual_seed(3);
  const auto x = torch::ones({1000}, torch::requires_grad());
  const auto y = checkpoint([](const at::Tensor& t) { return torch::dropout(t.tanh(), 0.5, true).exp(); }, x);
  const auto after_forward = torch::rand({4});
  torch::manual_seed(7);
  y.sum().backward();
  // Where the mask is zero the gradient is, and nowhere else.
  EXPECT_TRUE(at::equal(x.grad().ne(0), y.detach().ne(1)));
  const auto after_backward = torch::rand({4});
  torch::manual_seed(7);
  EXPECT_TRUE(at::equal(after_backward, torch::rand({4}))) << "backward moved the generator";
  torch::manual_seed(3);
  (void)torch::dropout(x, 0.5, true);
  EXPECT_TRUE(at::equal(after_forward, torch::rand({4}))) << "forward drew other numbers than a plain call";
}

TEST(Checkpoint, DrawsAnotherMaskWhenToldNotToKeepTheGenerator) {
  torch::manual_seed(3);
  const auto x = torch::ones({1000}, torch::requires_grad());
  const auto mask_of_forward = [](const at::Tensor& t) { return torch::dropout(t.tanh(), 0.5, true).exp(); };
  const auto y = checkpoint({.preserve_rng_state = false}, mask_of_forward, x);
  y.sum().backward();
  EXPECT_FALSE(at::equal(x.grad().ne(0), y.detach().ne(1)));
}

TEST(Checkpoint, NestsAndTakesTheFunctionsSeveralOutputs) {
  const auto run = [](bool with_checkpoints, const at::Tensor& x) {
    const auto inner = [](const at::Tensor& t) { return t.sin().exp(); };
    const auto middle = [=](const at::Tensor& t, double scale) {
      const auto a = with_checkpoints ? checkpoint(inner, t * scale) : inner(t * scale);
      return std::make_tuple(a.tanh(), a.square(), 3);
    };
    const auto outer = [=](const at::Tensor& t) {
      auto [a, b, n] = with_checkpoints ? checkpoint(middle, t.cos(), 0.5) : middle(t.cos(), 0.5);
      EXPECT_EQ(n, 3);
      const auto last = with_checkpoints ? checkpoint(inner, a * b) : inner(a * b);
      return std::vector<at::Tensor>{last.sigmoid(), b.exp(), a.log1p()};  // the last one is not used
    };
    const auto outputs = with_checkpoints ? checkpoint(outer, x) : outer(x);
    return outputs[0].sum() + outputs[1].square().sum();
  };
  const auto x = leaf(1), y = leaf(1);
  run(false, x).backward();
  run(true, y).backward();
  EXPECT_TRUE(at::equal(x.grad(), y.grad()));
}

TEST(Checkpoint, KeepsArgumentsOfEveryKind) {
  const auto a = leaf(1), b = leaf(2), c = leaf(3), d = leaf(4);
  struct Config {
    double scale;
  };
  const auto fn = [](const std::vector<at::Tensor>& list, const std::pair<at::Tensor, int>& pair,
                     const std::optional<at::Tensor>& some, const std::optional<at::Tensor>& none,
                     const std::array<at::Tensor, 2>& array, const at::Tensor& undefined, const Config& config,
                     const std::string& text) {
    EXPECT_FALSE(none.has_value());
    EXPECT_FALSE(undefined.defined());
    EXPECT_EQ(text, "text");
    return (list[0] * list[1]).exp() * pair.first.sin() * pair.second +
           (*some * array[0] * array[1]).tanh() * config.scale;
  };
  std::vector<std::vector<at::Tensor>> results;
  for (const bool again : {false, true}) {
    const std::vector<at::Tensor> list{a, b};
    const auto pair = std::make_pair(c * 2, 3);
    const std::optional<at::Tensor> some(d), none;
    const std::array<at::Tensor, 2> array{a, c};
    const auto y = again ? checkpoint(fn, list, pair, some, none, array, at::Tensor(), Config{0.5}, "text")
                         : fn(list, pair, some, none, array, at::Tensor(), Config{0.5}, "text");
    results.push_back(torch::autograd::grad({y.sum()}, {a, b, c, d}));
  }
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(results[0][i], results[1][i])) << i;
}

TEST(Checkpoint, RunsOnceForEachBackwardOfARetainedGraph) {
  const Counted counted;
  const auto x = leaf(1), expected = leaf(1);
  const auto y = checkpoint(counted, x).sum();
  y.backward({}, /*retain_graph=*/true);
  y.backward({}, /*retain_graph=*/true);
  y.backward();
  EXPECT_EQ(*counted.num_starts, 4);
  ((expected.tanh().exp() + 1).sum() * 3).backward();
  EXPECT_TRUE(at::allclose(x.grad(), expected.grad()));
}

TEST(Checkpoint, GradAndSecondDerivatives) {
  const auto fn = [](const at::Tensor& t) { return t.sin() * t.exp(); };
  const auto second = [&](bool with_checkpoint) {
    const auto x = leaf(1);
    const auto y = with_checkpoint ? checkpoint(fn, x) : fn(x);
    const auto first = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return std::make_pair(first, torch::autograd::grad({first.square().sum()}, {x})[0]);
  };
  EXPECT_TRUE(at::equal(second(true).first, second(false).first));
  EXPECT_TRUE(at::allclose(second(true).second, second(false).second));
}

TEST(Checkpoint, ABackwardInsideTheFunction) {
  const auto fn = [](const at::Tensor& t) {
    const auto y = t.sin().exp();
    const auto slope = torch::autograd::grad({y.sum()}, {t}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return (y * slope).tanh();
  };
  const auto x = leaf(1), expected = leaf(1);
  fn(expected).sum().backward();
  for (const bool early_stop : {true, false}) {
    x.mutable_grad() = at::Tensor();
    checkpoint({.early_stop = early_stop}, fn, x).sum().backward();
    EXPECT_TRUE(at::allclose(x.grad(), expected.grad())) << "early stop " << early_stop;
  }
}

TEST(Checkpoint, ReplaysAutocast) {
  torch::manual_seed(0);
  torch::nn::Linear layer(6, 6);
  std::vector<at::ScalarType> dtypes;
  const auto fn = [&](const at::Tensor& t) {
    const auto y = layer(t);
    dtypes.push_back(y.scalar_type());
    return y.exp();
  };
  const auto x = leaf(1);
  const auto loss = [&](bool with_checkpoint) {
    at::autocast::set_autocast_enabled(torch::kCPU, true);
    const auto y = with_checkpoint ? checkpoint({.early_stop = false}, fn, x) : fn(x);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(torch::kCPU, false);
    return y.sum();
  };
  const auto expected = torch::autograd::grad({loss(false)}, {layer->weight})[0];
  const auto actual = torch::autograd::grad({loss(true)}, {layer->weight})[0];
  EXPECT_TRUE(at::equal(expected, actual));
  EXPECT_EQ(dtypes, (std::vector<at::ScalarType>{torch::kBFloat16, torch::kBFloat16, torch::kBFloat16}));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(torch::kCPU));
}

TEST(Checkpoint, BackwardInAnotherThread) {
  const auto x = leaf(1), expected = leaf(1);
  const auto y = checkpoint(Counted(), x).sum();
  std::thread([&] { y.backward(); }).join();
  Counted()(expected).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), expected.grad()));
}

TEST(Checkpoint, NamesBothTensorsWhenTheFunctionComputesAnotherShape) {
  auto calls = std::make_shared<int>(0);
  const auto x = leaf(1);
  const auto y =
      checkpoint([calls](const at::Tensor& t) { return ++*calls == 1 ? t.exp() : t.narrow(0, 0, 2).exp(); }, x);
  torch::manual_seed(7);
  EXPECT_ERROR(y.sum().backward(), CheckpointError,
               "saved tensor 1 of 1 was [4, 6] Float on cpu in forward and is [2, 6] Float on cpu now");
  const auto after = torch::rand({4});
  torch::manual_seed(7);
  EXPECT_TRUE(at::equal(after, torch::rand({4}))) << "the generator was not given back";
  checkpoint(Counted(), x).sum().backward();  // nothing is left behind
  EXPECT_TRUE(x.grad().defined());
}

TEST(Checkpoint, CountsTensorsWhenTheFunctionTakesAnotherPath) {
  auto calls = std::make_shared<int>(0);
  const auto fewer = [calls](const at::Tensor& t) { return ++*calls % 2 == 1 ? t.exp().exp() : t.exp() + 1; };
  EXPECT_ERROR(checkpoint(fewer, leaf(1)).sum().backward(), CheckpointError,
               "saved 1 tensors when it ran again in backward, but at least 2 in forward");
  *calls = 0;
  const auto more = [calls](const at::Tensor& t) { return ++*calls % 2 == 0 ? t.exp().exp() : t.exp() + 1; };
  EXPECT_ERROR(checkpoint({.early_stop = false}, more, leaf(1)).sum().backward(), CheckpointError,
               "saved more than 1 tensors when it ran again");
}

TEST(Checkpoint, ComparesNothingWhenToldSo) {
  auto calls = std::make_shared<int>(0);
  const auto x = leaf(1);
  const auto saves_double = [calls](const at::Tensor& t) {
    return ++*calls == 1 ? t.exp() : t.to(torch::kDouble).exp().to(torch::kFloat);
  };
  EXPECT_ERROR(checkpoint(saves_double, x).sum().backward(), CheckpointError, "Double on cpu now");
  *calls = 0;
  checkpoint({.determinism_check = false}, saves_double, x).sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

// A custom function that reads what it saved once too often.
struct ReadsTwice : torch::autograd::Function<ReadsTwice> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x.square();
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    (void)context->get_saved_variables();
    return {grads[0] * context->get_saved_variables()[0] * 2};
  }
};

TEST(Checkpoint, RefusesToGiveATensorTwice) {
  const auto fn = [](const at::Tensor& t) { return ReadsTwice::apply(t.exp()); };
  EXPECT_ERROR(checkpoint(fn, leaf(1)).sum().backward(), CheckpointError, "unpacked twice in one backward");
}

TEST(Checkpoint, NoticesArgumentsChangedInPlace) {
  const auto x = leaf(1);
  auto between = x * 2;
  const auto y = checkpoint(Counted(), between);
  between.add_(1);
  EXPECT_ERROR(y.sum().backward(), c10::Error, "modified by an inplace operation");
  auto inside = x * 2;
  const auto z = checkpoint([](at::Tensor t) { return t.mul_(2).exp(); }, inside);
  EXPECT_ERROR(z.sum().backward(), c10::Error, "modified by an inplace operation");
}

TEST(Checkpoint, ErrorsOfTheFunctionPassAndLeaveNothing) {
  const auto x = leaf(1);
  EXPECT_ERROR(checkpoint(
                   [](const at::Tensor& t) -> at::Tensor {
                     TORCH_CHECK_VALUE(!t.defined(), "no luck");
                     return t;
                   },
                   x),
               c10::ValueError, "no luck");
  auto calls = std::make_shared<int>(0);
  const auto y = checkpoint(
      [calls](const at::Tensor& t) {
        TORCH_CHECK_VALUE(++*calls != 2, "no luck the second time");
        return t.exp();
      },
      x);
  EXPECT_ERROR(y.sum().backward({}, /*retain_graph=*/true), c10::ValueError, "no luck the second time");
  y.sum().backward();  // the third time all is well
  EXPECT_TRUE(at::equal(x.grad(), x.detach().exp()));
  EXPECT_TRUE(at::GradMode::is_enabled());
}

TEST(Checkpoint, KeepsItsArgumentsOnly) {
  const int64_t size = 4000;
  const auto x = leaf(1, {1000});
  const auto fn = [](const at::Tensor& t) { return t.sin().exp().tanh().sigmoid().sum(); };
  const LiveBytes bytes;
  const auto kept = [&](auto&& forward) {
    const auto before = bytes.current();
    const auto y = forward();
    return bytes.current() - before;
  };
  EXPECT_GE(kept([&] { return fn(x * 2); }), 4 * size);
  const auto with_checkpoint = kept([&] { return checkpoint(fn, x * 2); });
  EXPECT_GE(with_checkpoint, size);
  EXPECT_LT(with_checkpoint, 2 * size + 8192);  // and the state of the generator
  EXPECT_EQ(bytes.current(), 0);                // nothing keeps itself
}

TEST(Checkpoint, KeepsNotEvenArgumentsInsideACheckpoint) {
  const int64_t size = 400000;
  const auto x = leaf(1, {100000});
  const auto inner = [](const at::Tensor& t) { return t.sin().exp(); };
  const auto outer = [=](at::Tensor t) {
    for (int i = 0; i < 6; ++i) t = checkpoint(inner, t);
    return t.sum();
  };
  const LiveBytes bytes;
  {
    const auto y = checkpoint(outer, x);
    EXPECT_LT(bytes.current(), size);
    y.backward();
  }
  EXPECT_LT(bytes.peak(), 11 * size);  // six arguments, one function at a time, gradients
  x.mutable_grad() = at::Tensor();
  EXPECT_EQ(bytes.current(), 0);
}

TEST(Checkpoint, ForgetsWhatABackwardDidNotAskFor) {
  const auto x = leaf(1, {1000}), other = leaf(2, {1000});
  const auto fn = [](const at::Tensor& a, const at::Tensor& b) { return a.sin().exp() * b.cos().exp(); };
  const LiveBytes bytes;
  {
    const auto y = checkpoint(fn, x, other).sum();
    const auto before = bytes.current();
    const auto grads = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true);
    EXPECT_EQ(bytes.current() - before, static_cast<int64_t>(grads[0].nbytes()));
  }
  EXPECT_EQ(bytes.current(), 0);
}

TEST(Checkpoint, AnArgumentChangedInPlaceDoesNotKeepItself) {
  const auto x = leaf(1, {1000});
  const LiveBytes bytes;
  {
    auto between = x * 2;
    const auto y = checkpoint([](at::Tensor t) { return t.exp_() + 1; }, between);
  }
  EXPECT_EQ(bytes.current(), 0);
}

}  // namespace
}  // namespace fsdp::testing
