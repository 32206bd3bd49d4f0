// The losses of Python FSDP2 on the same weights and data.
#include <filesystem>
#include <fstream>

#include "support/child_process.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

constexpr int kNumSteps = 10;
constexpr int kWorldSize = 2;

// What both sides train on, one folder a net; gone with the test.
class TrainingDirectory {
 public:
  TrainingDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "fsdp_parity_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TrainingDirectory() { std::filesystem::remove_all(path_); }
  TrainingDirectory(const TrainingDirectory&) = delete;
  TrainingDirectory& operator=(const TrainingDirectory&) = delete;

  void write(const std::string& folder, const std::string& name, const at::Tensor& tensor) const {
    std::filesystem::create_directories(path_ / folder);
    const auto values = tensor.detach().contiguous();
    std::ofstream(path_ / folder / name, std::ios::binary)
        .write(static_cast<const char*>(values.const_data_ptr()), static_cast<std::streamsize>(values.nbytes()));
  }

  void run_python() const {
    ChildProcess python({FSDP_PYTHON, FSDP_PARITY_SCRIPT, path_.string(), std::to_string(kWorldSize)});
    const auto status = python.wait(std::chrono::seconds(180));
    ASSERT_TRUE(status && status->code == 0) << python.output();
  }

  [[nodiscard]] std::vector<double> losses(const std::string& folder) const {
    std::ifstream file(path_ / folder / "losses.txt");
    return {std::istream_iterator<double>(file), {}};
  }

 private:
  std::filesystem::path path_;
};

std::vector<double> losses_of_sharded(const NetFactory& make, const std::vector<at::Tensor>& batches) {
  std::vector<double> losses(kNumSteps);
  run_on_ranks(kWorldSize, [&](const RankContext& rank) {
    auto net = make();
    shard_units(*net, rank.mesh);
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    for (int step = 0; step < kNumSteps; ++step) {
      optimizer.zero_grad();
      auto loss = net->loss(batches[step].chunk(kWorldSize)[rank.rank()]);
      loss.backward();
      optimizer.step();
      const double mean = mean_over_ranks(loss, rank.group);
      if (rank.rank() == 0) {
        losses[step] = mean;
      }
    }
  });
  return losses;
}

std::vector<at::Tensor> write_start(const TrainingDirectory& directory, const std::string& folder, TestNet& net) {
  const auto parameters = net.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    directory.write(folder, std::to_string(i) + ".bin", parameters[i]);
  }
  std::vector<at::Tensor> batches;
  for (int step = 0; step < kNumSteps; ++step) {
    batches.push_back(net.batch(2 * kWorldSize, seeded(step)));
  }
  directory.write(folder, "data.bin", torch::stack(batches));
  return batches;
}

TEST(PythonFsdp2, HasTheSameLosses) {
  if (!std::filesystem::exists(FSDP_PYTHON)) {
    GTEST_SKIP() << "no Python with torch at " FSDP_PYTHON;
  }
  const std::vector<std::pair<std::string, NetFactory>> nets{{"mlp", net_of<Mlp>()}, {"gpt", net_of<Gpt>()}};
  const TrainingDirectory directory;
  std::map<std::string, std::vector<at::Tensor>> batches;
  for (const auto& [name, make] : nets) {
    batches[name] = write_start(directory, name, *make());
  }
  ASSERT_NO_FATAL_FAILURE(directory.run_python());
  for (const auto& [name, make] : nets) {
    const auto expected = directory.losses(name);
    const auto actual = losses_of_sharded(make, batches[name]);
    ASSERT_EQ(expected.size(), actual.size()) << name;
    for (int step = 0; step < kNumSteps; ++step) {
      EXPECT_NEAR(expected[step], actual[step], 1e-5) << name << ", step " << step;
      EXPECT_GT(expected[step], 0) << name << ", step " << step;
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
