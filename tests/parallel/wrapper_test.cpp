// CheckpointWrapper and apply_activation_checkpointing: the wrapped module under its own names.
#include <fsdp/checkpoint_wrapper.h>
#include <fsdp/fully_shard.h>

#include <set>
#include <sstream>

#include "support/errors.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

// Counts its runs; has a buffer, a child, and two arguments.
struct CountedBlockImpl : torch::nn::Cloneable<CountedBlockImpl> {
  CountedBlockImpl() { reset(); }
  void reset() override {
    linear = register_module("linear", torch::nn::Linear(6, 6));
    scale = register_parameter("scale", torch::ones({6}));
    shift = register_buffer("shift", torch::ones({6}));
  }
  at::Tensor forward(const at::Tensor& x, double factor) {
    ++num_runs;
    was_training = is_training();
    return (linear(x) * scale + shift).tanh() * factor;
  }
  torch::nn::Linear linear{nullptr};
  at::Tensor scale, shift;
  int num_runs = 0;
  bool was_training = false;
};
TORCH_MODULE(CountedBlock);

struct ParentImpl : torch::nn::Cloneable<ParentImpl> {
  ParentImpl() { reset(); }
  void reset() override { block = register_module("block", checkpoint_wrapper(CountedBlock())); }
  at::Tensor forward(const at::Tensor& x) { return block->forward(x, 2.0); }
  std::shared_ptr<CheckpointWrapper<CountedBlockImpl>> block;
};
TORCH_MODULE(Parent);

struct PlainParentImpl : torch::nn::Module {
  PlainParentImpl() { block = register_module("block", CountedBlock()); }
  CountedBlock block{nullptr};
};
TORCH_MODULE(PlainParent);

std::vector<std::string> names_of(const torch::nn::Module& module) {
  auto names = module.named_parameters().keys();
  for (const auto& name : module.named_buffers().keys()) names.push_back(name);
  return names;
}

template <class A, class B>
void expect_same_state(const A& a, const B& b) {
  const auto x = a->named_parameters(), y = b->named_parameters();
  for (const auto& item : x) EXPECT_TRUE(at::equal(item.value(), y[item.key()])) << item.key();
  for (const auto& item : a->named_buffers()) {
    EXPECT_TRUE(at::equal(item.value(), b->named_buffers()[item.key()])) << item.key();
  }
}

TEST(CheckpointWrapper, RunsTheModuleAgainInBackward) {
  Parent parent;
  parent(torch::randn({2, 6})).sum().backward();
  EXPECT_EQ(parent->block->wrapped()->num_runs, 2);
  EXPECT_TRUE(parent->block->wrapped()->scale.grad().defined());
  {
    const torch::NoGradGuard no_grad;
    (void)parent(torch::randn({2, 6}));
  }
  EXPECT_EQ(parent->block->wrapped()->num_runs, 3);
}

TEST(CheckpointWrapper, KeepsTheNames) {
  EXPECT_EQ(names_of(*Parent()), names_of(*PlainParent()));
  EXPECT_EQ(names_of(*Parent()),
            (std::vector<std::string>{"block.scale", "block.linear.weight", "block.linear.bias", "block.shift"}));
}

TEST(CheckpointWrapper, FilesFitBothWays) {
  torch::manual_seed(0);
  const Parent wrapped;
  const PlainParent plain;
  const auto move = [](const auto& from, const auto& to) {
    std::stringstream file;
    torch::save(from, file);
    auto target = to;
    torch::load(target, file);
    expect_same_state(from, to);
  };
  move(wrapped, PlainParent());
  move(plain, Parent());
  EXPECT_FALSE(at::equal(wrapped->block->wrapped()->linear->weight, plain->block->linear->weight));
}

TEST(CheckpointWrapper, ModesAndTypesReachTheModule) {
  Parent parent;
  auto& inner = *parent->block->wrapped();
  parent->eval();
  (void)parent(torch::randn({2, 6}));
  EXPECT_FALSE(inner.was_training);
  EXPECT_FALSE(inner.linear->is_training());
  parent->train();
  EXPECT_TRUE(inner.is_training());
  parent->to(torch::kDouble);
  EXPECT_EQ(inner.linear->weight.scalar_type(), torch::kDouble);
  EXPECT_EQ(inner.shift.scalar_type(), torch::kDouble);
  EXPECT_EQ(parent->block->named_buffers()["shift"].scalar_type(), torch::kDouble);
  parent(torch::randn({2, 6}, torch::kDouble)).sum().backward();
  parent->zero_grad();
  EXPECT_FALSE(inner.scale.grad().defined());
}

TEST(CheckpointWrapper, ClonesHaveParametersOfTheirOwn) {
  torch::manual_seed(0);
  const Parent parent;
  const auto clone = std::dynamic_pointer_cast<ParentImpl>(parent->clone());
  expect_same_state(parent, clone);
  EXPECT_FALSE(clone->block->wrapped()->scale.is_same(parent->block->wrapped()->scale));
  EXPECT_TRUE(clone->block->wrapped()->scale.is_same(clone->named_parameters()["block.scale"]));
  clone->forward(torch::randn({2, 6})).sum().backward();
  EXPECT_TRUE(clone->block->wrapped()->linear->weight.grad().defined());
  EXPECT_FALSE(parent->block->wrapped()->linear->weight.grad().defined());
}

TEST(CheckpointWrapper, SaysWhatItWraps) {
  std::ostringstream text;
  text << *checkpoint_wrapper(torch::nn::Linear(2, 3));
  EXPECT_THAT(text.str(), ::testing::HasSubstr("CheckpointWrapper of torch::nn::Linear(in_features=2, out_features=3"));
  EXPECT_ERROR((void)checkpoint_wrapper(std::shared_ptr<CountedBlockImpl>()), c10::ValueError, "no module to wrap");
}

// Six linears, all in Sequentials, two of them one level down.
struct PairImpl : torch::nn::Module {
  PairImpl() {
    layers = register_module("layers", torch::nn::Sequential(torch::nn::Linear(6, 6), torch::nn::Linear(6, 6)));
  }
  at::Tensor forward(const at::Tensor& x) { return layers->forward(x).tanh(); }
  torch::nn::Sequential layers{nullptr};
};
TORCH_MODULE(Pair);

struct SixLinearsImpl : torch::nn::Module {
  SixLinearsImpl() {
    using torch::nn::Linear;
    head = register_module("head", torch::nn::Sequential(Linear(6, 6), torch::nn::Tanh(), Linear(6, 6)));
    body = register_module("body", torch::nn::Sequential(Pair(), torch::nn::ReLU(), Linear(6, 6), Linear(6, 6)));
  }
  at::Tensor forward(const at::Tensor& x) { return body->forward(head->forward(x)); }
  torch::nn::Sequential head{nullptr}, body{nullptr};
};
TORCH_MODULE(SixLinears);

bool is_linear(const torch::nn::Module& module) { return module.as<torch::nn::Linear>() != nullptr; }

int num_wrappers(const torch::nn::Module& module) {
  std::set<torch::nn::Module*> wrappers;
  for (const auto& child : module.modules(/*include_self=*/false)) {
    if (dynamic_cast<CheckpointWrapperBase*>(child.get())) wrappers.insert(child.get());
  }
  return static_cast<int>(wrappers.size());
}

TEST(ApplyActivationCheckpointing, WrapsSixLinears) {
  torch::manual_seed(0);
  SixLinears model;
  const auto x = torch::randn({3, 6});
  const auto names = names_of(*model);
  const auto grads = [&] {
    model->zero_grad();
    model(x).square().sum().backward();
    std::vector<at::Tensor> result;
    for (const auto& parameter : model->parameters()) result.push_back(parameter.grad().clone());
    return result;
  };
  const auto before = grads();
  EXPECT_EQ(apply_activation_checkpointing(model, is_linear), 6);
  EXPECT_EQ(num_wrappers(*model), 6);
  EXPECT_EQ(names_of(*model), names);
  const auto after = grads();
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i])) << names[i];
  EXPECT_EQ(apply_activation_checkpointing(model, is_linear), 0) << "wrapped before";
}

TEST(ApplyActivationCheckpointing, WrapsInsideWhatItWrapsAndNeverTheRoot) {
  torch::manual_seed(0);
  SixLinears model;
  const auto x = torch::randn({3, 6});
  const auto expected = torch::autograd::grad({model(x).sum()}, model->parameters());
  const auto wrapped = apply_activation_checkpointing(
      model, [](const torch::nn::Module& m) { return is_linear(m) || m.as<Pair>() || m.as<SixLinears>(); });
  EXPECT_EQ(wrapped, 7);
  EXPECT_EQ(num_wrappers(*model), 7);
  const auto actual = torch::autograd::grad({model(x).sum()}, model->parameters());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(expected[i], actual[i])) << i;
}

TEST(ApplyActivationCheckpointing, AModuleInTwoPlacesStaysOne) {
  const torch::nn::Linear shared(6, 6);
  torch::nn::Sequential model(shared, torch::nn::Tanh(), shared);
  EXPECT_EQ(apply_activation_checkpointing(model, is_linear), 2);
  EXPECT_EQ(model->ptr(0), model->ptr(2));
  EXPECT_EQ(num_wrappers(*model), 1);
}

TEST(ApplyActivationCheckpointing, AContainerInTwoPlacesHoldsItsChildrenOnce) {
  const torch::nn::Sequential shared(torch::nn::Linear(6, 6), torch::nn::Tanh());
  torch::nn::Module model;
  model.register_module("a", shared);
  model.register_module("b", shared);
  EXPECT_EQ(apply_activation_checkpointing(model, is_linear), 1);
  EXPECT_EQ(num_wrappers(model), 1);
  EXPECT_EQ(apply_activation_checkpointing(model, is_linear), 0) << "wrapped before";
}

// A module that its parent calls by its type, in each of the ways C++ has.
struct TypedParentImpl : torch::nn::Module {
  TypedParentImpl() {
    member = register_module("member", torch::nn::Linear(6, 6));
    list = register_module("list", torch::nn::ModuleList(torch::nn::Linear(6, 6)));
    layers = register_module("layers", torch::nn::Sequential(torch::nn::Linear(6, 6)));
  }
  torch::nn::Linear member{nullptr};
  torch::nn::ModuleList list{nullptr};
  torch::nn::Sequential layers{nullptr};
};

TEST(ApplyActivationCheckpointing, RefusesByPathWhatIsHeldByType) {
  TypedParentImpl model;
  try {
    apply_activation_checkpointing(model, is_linear);
    ADD_FAILURE() << "not refused";
  } catch (const c10::ValueError& error) {
    const auto text = message_of(error);
    EXPECT_THAT(text, ::testing::HasSubstr("\n  member: a Linear in a "));
    EXPECT_THAT(text, ::testing::HasSubstr("\n  list.0: a Linear in a ModuleList"));
    EXPECT_THAT(text, ::testing::Not(::testing::HasSubstr("layers.0")));
    EXPECT_THAT(text, ::testing::HasSubstr("call fsdp::checkpoint(child, x)"));
  }
  EXPECT_EQ(num_wrappers(model), 0) << "something was changed";
  EXPECT_ERROR(apply_activation_checkpointing(model, nullptr), c10::ValueError, "the predicate is empty");
}

TEST(ApplyActivationCheckpointing, SaysWhichForwardDoesNotFit) {
  torch::nn::Sequential model(torch::nn::LSTM(6, 6));
  EXPECT_EQ(apply_activation_checkpointing(model, [](const torch::nn::Module&) { return true; }), 1);
  EXPECT_ERROR(model->forward(torch::randn({2, 3, 6})), c10::Error, "std::tuple<at::Tensor");
}

TEST(ApplyActivationCheckpointing, TrainsShardedAsOneProcess) {
  for (const int size : {1, 2, 3}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>(), {.shard = false});
      auto& layers = Twins::as<Mlp>(*twins.sharded).layers;
      EXPECT_EQ(apply_activation_checkpointing(layers, is_linear), 3);
      shard_units(*twins.sharded, rank.mesh);
      expect_same_training(twins, {.num_steps = 3});
      EXPECT_CONTAINS(describe(*twins.sharded), "FSDPCheckpointWrapper<Linear>(");
      EXPECT_TRUE(is_fsdp(*layers->ptr(0)));
    });
  }
}

TEST(ApplyActivationCheckpointing, ComesBeforeFullyShard) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    const auto text = error_of([&] { apply_activation_checkpointing(*twins.sharded, is_linear); });
    EXPECT_CONTAINS(text, "'layers.0' was wrapped by fully_shard before");
  });
}

}  // namespace
}  // namespace fsdp::testing
