// SavedTensorHooks and save_on_cpu: scopes that decide how autograd keeps tensors.
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

// Keeps tensors as they are and counts.
struct Counts {
  int num_packed = 0, num_unpacked = 0;
  SavedTensorHooks::Pack pack() {
    return [this](const at::Tensor& x) {
      ++num_packed;
      return [this, x] { return ++num_unpacked, x; };
    };
  }
};

at::Tensor input(uint64_t seed) { return torch::empty({4, 6}).normal_(0, 1, seeded(seed)).requires_grad_(); }

TEST(SavedTensorHooks, SeeEachSavedTensorInBothDirections) {
  const auto x = input(1);
  Counts counts;
  at::Tensor y;
  {
    const SavedTensorHooks hooks(counts.pack());
    y = x.exp().tanh() + 1;
  }
  const auto outside = x.exp();
  EXPECT_EQ(counts.num_packed, 2);
  EXPECT_EQ(counts.num_unpacked, 0);
  y.sum().backward();
  EXPECT_EQ(counts.num_packed, 2);
  EXPECT_EQ(counts.num_unpacked, 2);
  const auto expected = input(1);
  (expected.exp().tanh() + 1).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), expected.grad()));
}

TEST(SavedTensorHooks, GiveBackWhatTheyMake) {
  const auto x = input(1);
  at::Tensor y;
  {
    const SavedTensorHooks hooks(
        [](const at::Tensor& t) { return [half = t.to(torch::kHalf)] { return half.to(torch::kFloat); }; });
    y = x.square();
  }
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), x.detach().to(torch::kHalf).to(torch::kFloat) * 2));
}

TEST(SavedTensorHooks, TheInnermostScopeCounts) {
  const auto x = input(1);
  Counts outer, inner;
  {
    const SavedTensorHooks outer_hooks(outer.pack());
    const auto a = x.exp();
    {
      const SavedTensorHooks inner_hooks(inner.pack());
      const auto b = a.exp().exp();
    }
    const auto c = a.exp();
  }
  EXPECT_EQ(outer.num_packed, 2);
  EXPECT_EQ(inner.num_packed, 2);
}

TEST(SavedTensorHooks, MayEndInAnyOrder) {
  const auto x = input(1);
  Counts first, second;
  auto outer = std::make_unique<SavedTensorHooks>(first.pack());
  auto inner = std::make_unique<SavedTensorHooks>(second.pack());
  outer.reset();
  const auto a = x.exp();
  EXPECT_EQ(second.num_packed, 1);
  inner.reset();
  const auto b = x.exp();
  EXPECT_EQ(first.num_packed, 0);
  EXPECT_EQ(second.num_packed, 1);
}

TEST(SavedTensorHooks, SeeOnlyTheArgumentsOfACheckpoint) {
  const auto x = input(1);
  Counts counts;
  at::Tensor y;
  {
    const SavedTensorHooks hooks(counts.pack());
    y = checkpoint([](const at::Tensor& t) { return t.exp().exp().exp(); }, x * 2);
  }
  EXPECT_EQ(counts.num_packed, 1);
  y.sum().backward();
  EXPECT_EQ(counts.num_unpacked, 1);
}

TEST(SavedTensorHooks, BelongToOneThread) {
  Counts counts;
  const SavedTensorHooks hooks(counts.pack());
  std::thread([] { input(1).exp().sum().backward(); }).join();
  EXPECT_EQ(counts.num_packed, 0);
}

TEST(SavedTensorHooks, EndWithTheirScopeAlsoByAnError) {
  Counts counts;
  const auto fail_inside = [&] {
    const SavedTensorHooks hooks(counts.pack());
    TORCH_CHECK(false, "out");
  };
  EXPECT_ERROR(fail_inside(), c10::Error, "out");
  const auto y = input(1).exp();
  EXPECT_EQ(counts.num_packed, 0);
}

TEST(SavedTensorHooks, OutputsDoNotKeepThemselves) {
  const auto x = input(1);
  Counts counts;
  const LiveBytes bytes;
  {
    const SavedTensorHooks hooks(counts.pack());
    const auto y = x.exp();
    EXPECT_GT(bytes.current(), 0);
  }
  EXPECT_EQ(bytes.current(), 0);
}

TEST(SavedTensorHooks, RefuseEmptyFunctions) {
  EXPECT_ERROR(SavedTensorHooks(nullptr), c10::ValueError, "the pack function is empty");
  const SavedTensorHooks hooks([](const at::Tensor&) { return SavedTensorHooks::Unpack(); });
  EXPECT_ERROR(input(1).exp(), c10::ValueError, "pack returned an empty function");
}

TEST(SavedTensorHooks, MayNotChangeWhatTheyAreGiven) {
  const SavedTensorHooks hooks([](const at::Tensor& x) {
    at::Tensor(x).zero_();
    return [x] { return x; };
  });
  EXPECT_ERROR(input(1).exp(), c10::Error, "pack hook is modifying its input in place");
}

// Collects warnings in place of the log.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;
};

TEST(SaveOnCpu, SaysOnceThatTensorsAreThereAlready) {
  Warnings warnings;
  const auto x = input(1);
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    for (const bool pin_memory : {false, true}) {
      const auto scope = save_on_cpu({.pin_memory = pin_memory});
      x.exp().tanh().sum().backward();
    }
  }
  ASSERT_EQ(warnings.messages.size(), 1U);
  EXPECT_THAT(warnings.messages[0], ::testing::HasSubstr("on the CPU already"));
  const auto expected = input(1);
  (expected.exp().tanh().sum() * 2).backward();
  EXPECT_TRUE(at::allclose(x.grad(), expected.grad()));
}

TEST(SaveOnCpu, StillNoticesChangesInPlace) {
  const auto x = input(1);
  at::Tensor y;
  auto between = x * 2;
  {
    const auto scope = save_on_cpu();
    y = between.square();
  }
  between.add_(1);
  EXPECT_ERROR(y.sum().backward(), c10::Error, "modified by an inplace operation");
}

}  // namespace
}  // namespace fsdp::testing
