// Functions of a module take it by reference, by holder and by std::shared_ptr, and say when there is none.
#include <fsdp/module_pointer.h>

#include "support/errors.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

static_assert(detail::ModulePointer<torch::nn::Linear>);
static_assert(detail::ModulePointer<std::shared_ptr<torch::nn::Module>>);
static_assert(detail::ModulePointer<std::shared_ptr<TestNet>>);
static_assert(!detail::ModulePointer<TestNet>);
static_assert(!detail::ModulePointer<std::shared_ptr<int>>);
static_assert(!detail::ModulePointer<std::vector<std::shared_ptr<torch::nn::Module>>>);

template <class P>
void expect_no_module(const P& none, const std::string& why) {
  const auto expect = [&](const std::string& function, const std::function<void()>& call) {
    EXPECT_CONTAINS(error_of<c10::ValueError>(call), function + ": " + why);
  };
  const auto init = [](torch::nn::Module&) {};
  const auto predicate = [](const torch::nn::Module&) { return true; };
  expect("fully_shard", [&] { fully_shard(none); });
  expect("replicate", [&] { replicate(none); });
  expect("materialize", [&] { materialize(none, torch::kCPU, init); });
  expect("apply_activation_checkpointing", [&] { apply_activation_checkpointing(none, predicate); });
  expect("context_parallel", [&] { (void)context_parallel(none, {}, {}, {}); });
}

TEST(ModulePointer, SaysThatThereIsNoModule) {
  expect_no_module(std::shared_ptr<torch::nn::Module>(), "the module is null");
  expect_no_module(std::shared_ptr<TestNet>(), "the module is null");
  expect_no_module(torch::nn::Linear(nullptr), "the module holder is empty");
}

}  // namespace
}  // namespace fsdp::testing
