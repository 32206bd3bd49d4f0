// The losses of Python FSDP2, and of DDP, on the same weights and data.
#include <filesystem>
#include <fstream>

#include "support/child_process.h"
#include "support/parity.h"
#include "support/scratch_directory.h"

namespace fsdp::testing {
namespace {

constexpr int kNumSteps = 10;
constexpr int64_t kRowsPerRank = 2;

// A frozen base with adapters of rank 2 that train.
class Lora : public TestNet {
 public:
  Lora() {
    base = register_module("base", torch::nn::Linear(7, 13));
    down = register_module("down", torch::nn::Linear(torch::nn::LinearOptions(7, 2).bias(false)));
    up = register_module("up", torch::nn::Linear(torch::nn::LinearOptions(2, 13).bias(false)));
    for (auto& parameter : base->parameters()) parameter.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) override { return base(x) + up(down(x)) - 1; }
  std::vector<torch::nn::Module*> units() override { return {base.get(), this}; }
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override {
    return torch::empty({batch_size, 7}).normal_(0, 1, generator);
  }

  torch::nn::Linear base{nullptr}, down{nullptr}, up{nullptr};
};

// One training run that both sides do. The Python script knows it by its name: NET[_VARIANT].
struct Case {
  std::string name;
  NetFactory net;
  double tolerance = 1e-5;
  MixedPrecisionPolicy mp_policy = {};
  bool replicates = false;
  int64_t num_microbatches = 1;
  bool is_ddp = false;  // the loss is the mean square of the output
};

// What both sides train on, one folder a net; gone with the test.
class TrainingDirectory {
 public:
  void write(const std::string& folder, const std::string& name, const at::Tensor& tensor) const {
    std::filesystem::create_directories(path_ / folder);
    const auto values = tensor.detach().contiguous();
    std::ofstream(path_ / folder / name, std::ios::binary)
        .write(static_cast<const char*>(values.const_data_ptr()), static_cast<std::streamsize>(values.nbytes()));
  }

  void run_python(int world_size, const std::vector<Case>& cases) const {
    std::vector<std::string> command{FSDP_PYTHON, FSDP_PARITY_SCRIPT, path_.string(), std::to_string(world_size)};
    for (const auto& test : cases) command.push_back(test.name);
    ChildProcess python(command);
    const auto status = python.wait(std::chrono::seconds(180));
    ASSERT_TRUE(status && status->code == 0) << python.output();
  }

  [[nodiscard]] std::vector<double> losses(const std::string& folder) const {
    std::ifstream file(path_ / folder / "losses.txt");
    return {std::istream_iterator<double>(file), {}};
  }

 private:
  ScratchDirectory directory_;
  std::filesystem::path path_ = directory_.file("");
};

// Each parameter once: parameters() of a C++ module lists a tied one twice.
std::vector<at::Tensor> trained_parameters(const torch::nn::Module& net) {
  std::vector<at::Tensor> trained;
  for (const auto& parameter : net.parameters()) {
    const bool is_known =
        std::any_of(trained.begin(), trained.end(), [&](const at::Tensor& other) { return other.is_same(parameter); });
    if (parameter.requires_grad() && !is_known) trained.push_back(parameter);
  }
  return trained;
}

torch::optim::AdamW optimizer_of(const torch::nn::Module& net) {
  return torch::optim::AdamW(trained_parameters(net), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
}

double train_step(TestNet& net, torch::optim::Optimizer& optimizer, const at::Tensor& rows, const Case& test) {
  optimizer.zero_grad();
  double total = 0;
  auto root = FSDPModule::of(net);
  const auto parts = rows.chunk(test.num_microbatches);
  for (size_t i = 0; i < parts.size(); ++i) {
    root.set_requires_gradient_sync(i + 1 == parts.size());
    const auto loss = net.loss(parts[i]) / static_cast<double>(parts.size());
    loss.backward();
    total += loss.item<double>();
  }
  optimizer.step();
  return total;
}

std::vector<double> losses_of_sharded(const Case& test, int world_size, const std::vector<at::Tensor>& batches) {
  std::vector<double> losses(kNumSteps);
  run_on_ranks(world_size, [&](const RankContext& rank) {
    auto net = test.net();
    const auto mesh = test.replicates ? mesh_2d(rank, 2, world_size / 2, "hsdp") : rank.mesh;
    shard_units(*net, {.mesh = mesh, .mp_policy = test.mp_policy});
    auto optimizer = optimizer_of(*net);
    for (int step = 0; step < kNumSteps; ++step) {
      const auto total = train_step(*net, optimizer, batches[step].chunk(world_size)[rank.rank()], test);
      const double mean = mean_over_ranks(torch::tensor(total, at::kDouble), rank.group);
      if (rank.rank() == 0) losses[step] = mean;
    }
  });
  return losses;
}

double ddp_step(DistributedDataParallel<TestNet>& ddp, torch::optim::Optimizer& optimizer, const at::Tensor& rows,
                const Case& test) {
  optimizer.zero_grad();
  double total = 0;
  const auto parts = rows.chunk(test.num_microbatches);
  for (size_t i = 0; i < parts.size(); ++i) {
    std::optional<NoSync> scope;
    if (i + 1 < parts.size()) scope.emplace(ddp->no_sync());
    const auto loss = ddp->forward(parts[i]).square().mean() / static_cast<double>(parts.size());
    loss.backward();
    total += loss.item<double>();
  }
  optimizer.step();
  return total;
}

std::vector<double> losses_of_ddp(const Case& test, int world_size, const std::vector<at::Tensor>& batches) {
  std::vector<double> losses(kNumSteps);
  run_on_ranks(world_size, [&](const RankContext& rank) {
    auto net = test.net();
    DistributedDataParallel ddp(net, {.mesh = rank.mesh});
    auto optimizer = optimizer_of(*net);
    for (int step = 0; step < kNumSteps; ++step) {
      const auto total = ddp_step(ddp, optimizer, batches[step].chunk(world_size)[rank.rank()], test);
      const double mean = mean_over_ranks(torch::tensor(total, at::kDouble), rank.group);
      if (rank.rank() == 0) losses[step] = mean;
    }
  });
  return losses;
}

std::vector<at::Tensor> write_start(const TrainingDirectory& directory, const Case& test, int world_size) {
  const auto net = test.net();
  const auto parameters = net->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) directory.write(test.name, std::to_string(i) + ".bin", parameters[i]);
  std::vector<at::Tensor> batches;
  for (int step = 0; step < kNumSteps; ++step) batches.push_back(net->batch(kRowsPerRank * world_size, seeded(step)));
  directory.write(test.name, "data.bin", torch::stack(batches));
  return batches;
}

void expect_same_losses(int world_size, const std::vector<Case>& cases) {
  if (!std::filesystem::exists(FSDP_PYTHON)) {
    GTEST_SKIP() << "no Python with torch at " FSDP_PYTHON;
  }
  const TrainingDirectory directory;
  std::map<std::string, std::vector<at::Tensor>> batches;
  for (const auto& test : cases) batches[test.name] = write_start(directory, test, world_size);
  ASSERT_NO_FATAL_FAILURE(directory.run_python(world_size, cases));
  for (const auto& test : cases) {
    const auto expected = directory.losses(test.name);
    const auto actual = test.is_ddp ? losses_of_ddp(test, world_size, batches[test.name])
                                    : losses_of_sharded(test, world_size, batches[test.name]);
    ASSERT_EQ(expected.size(), actual.size()) << test.name;
    for (int step = 0; step < kNumSteps; ++step) {
      EXPECT_NEAR(expected[step], actual[step], test.tolerance) << test.name << ", step " << step;
      EXPECT_GT(expected[step], 0) << test.name << ", step " << step;
    }
  }
}

TEST(Python, HasTheSameLossesWithFsdp2AndDdp) {  // one run of Python, whose start is what takes long
  expect_same_losses(2, {
                            {"mlp", net_of<Mlp>()},
                            {"gpt", net_of<Gpt>()},
                            {.name = "mlp_ddp", .net = net_of<Mlp>(), .is_ddp = true},
                            {.name = "mlp_ddpaccumulate", .net = net_of<Mlp>(), .num_microbatches = 2, .is_ddp = true},
                        });
}

TEST(Python, HasTheSameLossesUnderOptionsOfFsdp2) {
  expect_same_losses(4, {
                            // bf16 rounds where the two sides add up in another order
                            {.name = "gpt_mixed",
                             .net = net_of<Gpt>(),
                             .tolerance = 2e-2,
                             .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}},
                            {.name = "gpt_hsdp", .net = net_of<Gpt>(), .replicates = true},
                            {.name = "mlp_accumulate", .net = net_of<Mlp>(), .num_microbatches = 2},
                            {.name = "lora", .net = net_of<Lora>()},
                            {.name = "gpt_tied", .net = net_of<Gpt>(2, /*tied=*/true)},
                        });
}

}  // namespace
}  // namespace fsdp::testing
