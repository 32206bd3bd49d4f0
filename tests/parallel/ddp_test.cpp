// DistributedDataParallel against one process on the joined batch.
#include <fsdp/distributed_data_parallel.h>

#include "support/counting_backend.h"
#include "support/errors.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

using DdpOptions = DistributedDataParallelOptions;
constexpr double kTinyBucketMb = 1e-6;  // every parameter a bucket of its own

at::Tensor ddp_loss(const at::Tensor& output) { return output.square().mean(); }

// The plain net on the joined batch and the same net in a DistributedDataParallel on this rank's part.
struct DdpTwins {
  DdpTwins(const RankContext& context, const NetFactory& make, DdpOptions options = {})
      : twins(context, make, {.shard = false}) {
    options.mesh = context.mesh;
    ddp = DistributedDataParallel(twins.sharded, options);
  }
  void backward() {
    ddp_loss(twins.plain->forward(twins.joined)).backward();
    ddp_loss(ddp->forward(twins.part)).backward();
  }
  void train(int num_steps, double tolerance = kClose) {
    const auto p = sgd()(twins.p), q = sgd()(twins.q);
    for (int step = 0; step < num_steps; ++step) {
      backward();
      EXPECT_SAME_GRADS(twins, tolerance) << "step " << step;
      p->step();
      q->step();
      twins.zero_grad();
      twins.next_batch();
    }
    EXPECT_SAME_PARAMETERS(twins, tolerance);
  }

  Twins twins;
  DistributedDataParallel<TestNet> ddp{nullptr};
};

TEST(Ddp, TheWorkedExample) {  // R32: y = 2x, one weight from 0
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Linear line(torch::nn::LinearOptions(1, 1).bias(false));
    torch::nn::init::constant_(line->weight, rank.rank() * 5.0);  // rank 0's start counts
    auto ddp = DistributedDataParallel(line, {.mesh = rank.mesh});
    torch::optim::SGD optimizer(ddp->parameters(), 0.01);
    const auto x = torch::tensor({{1.0F + 2 * rank.rank()}, {2.0F + 2 * rank.rank()}});
    for (const double expected : {0.3, 0.555, 0.77175}) {
      torch::mse_loss(ddp->forward(x), 2 * x).backward();
      if (expected == 0.3) {
        EXPECT_NEAR(line->weight.grad().item<double>(), -30, 1e-5);
      }
      optimizer.step();
      optimizer.zero_grad();
      EXPECT_NEAR(line->weight.item<double>(), expected, 1e-6);
    }
  });
}

TEST(Ddp, TrainsAsOneProcess) {
  for (const int size : {1, 2, 3}) {
    run_on_ranks(size, [](const RankContext& rank) {
      DdpTwins(rank, net_of<Mlp>()).train(5);
      DdpTwins(rank, net_of<Mlp>(), {.bucket_cap_mb = kTinyBucketMb, .gradient_as_bucket_view = true}).train(5);
      DdpTwins(rank, net_of<Mlp>(), {.find_unused_parameters = true}).train(3);
      DdpTwins(rank, net_of<Mlp>(), {.static_graph = true}).train(4);
      DdpTwins(rank, net_of<Lstm>(), {.bucket_cap_mb = 0.001}).train(3);
    });
  }
}

// Registered in another order than used.
struct OutOfOrder : torch::nn::Module {
  OutOfOrder() {
    const auto linear = [](int64_t in, int64_t out) {
      return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
    };
    third = register_module("third", linear(16, 8));
    first = register_module("first", linear(8, 4));
    second = register_module("second", linear(4, 16));
    fill_parameters(*this, 3);
  }
  at::Tensor forward(const at::Tensor& x) { return third(second(first(x).tanh()).tanh()); }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
};

TEST(Ddp, BucketsFollowTheOrderOfTheFirstBackward) {  // behaviours 150
  run_on_ranks(2, [](const RankContext& rank) {
    const auto store = c10::make_intrusive<c10d::PrefixStore>("counted", rank.store);
    const auto group = make_counting_group(store, rank.rank(), 2);
    const auto net = std::make_shared<OutOfOrder>();
    const auto plain = std::make_shared<OutOfOrder>();
    DistributedDataParallel ddp(net,
                                {.mesh = DeviceMesh::from_group(group, torch::kCPU), .bucket_cap_mb = kTinyBucketMb});
    const auto joined = torch::empty({4, 8}).normal_(0, 1, seeded(1));
    using Reduced = CountingBackend::AllReduce;
    std::vector<Reduced> expected{{224, at::kFloat}};
    for (int step = 0; step < 3; ++step) {
      ddp->zero_grad();
      plain->zero_grad();
      ddp_loss(ddp->forward(joined.chunk(2)[rank.rank()])).backward();
      ddp_loss(plain->forward(joined)).backward();
      EXPECT_LE(difference(grads(plain->parameters()), grads(net->parameters())), kClose) << step;
      EXPECT_EQ(counts_of(group).all_reduces(), expected) << step;
      for (const int64_t numel : {128, 64, 32}) expected.push_back({numel, at::kFloat});
    }
  });
}

// Two branches, each with parameters of its own; which of them the output depends on is told.
struct Branches : torch::nn::Module {
  Branches() {
    left = register_module("left", torch::nn::Linear(4, 2));
    right = register_module("right", torch::nn::Linear(4, 2));
    fill_parameters(*this, 7);
  }
  at::Tensor forward(const at::Tensor& x, bool use_left, bool use_right) {
    auto sum = x.sum() * 0;
    if (use_left) sum = sum + left(x).square().mean();
    if (use_right) sum = sum + right(x).square().mean();
    return sum;
  }
  torch::nn::Linear left{nullptr}, right{nullptr};
};

at::Tensor batch_of(const RankContext& rank) { return torch::empty({2, 4}).normal_(0, 1, seeded(rank.rank())); }

TEST(Ddp, UnusedParametersAreNamed) {  // behaviours 147
  run_on_ranks(2, [](const RankContext& rank) {
    const auto net = std::make_shared<Branches>();
    DistributedDataParallel ddp(net, {.mesh = rank.mesh});
    ddp->forward(batch_of(rank), true, false).backward();
    const auto message = error_of([&] { ddp->forward(batch_of(rank), true, true); });
    EXPECT_CONTAINS(message, "right.weight (index 2), right.bias (index 3)");
    EXPECT_CONTAINS(message, "find_unused_parameters = true");
    EXPECT_EQ(message.find("left.weight"), std::string::npos) << message;
  });
}

TEST(Ddp, UnusedParametersMayBe) {  // behaviours 147, R32
  run_on_ranks(2, [](const RankContext& rank) {
    const auto net = std::make_shared<Branches>();
    DistributedDataParallel ddp(net, {.mesh = rank.mesh, .find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      ddp->forward(batch_of(rank), true, false).backward();
      EXPECT_TRUE(net->left->weight.grad().defined());
      EXPECT_FALSE(net->right->weight.grad().defined()) << "used by no rank";
      ddp->zero_grad();
    }
    const auto own = std::make_shared<Branches>();
    own->forward(torch::empty({2, 4}).normal_(0, 1, seeded(1)), false, true).backward();
    ddp->forward(batch_of(rank), true, rank.rank() == 1).backward();
    EXPECT_LE(difference(own->right->weight.grad() / 2, net->right->weight.grad()), kClose)
        << "used by rank 1 only: zeros from the others";
  });
}

struct TwoOutputs : torch::nn::Module {
  TwoOutputs() {
    a = register_module("a", torch::nn::Linear(4, 2));
    b = register_module("b", torch::nn::Linear(4, 2));
    fill_parameters(*this, 7);
  }
  std::pair<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x) { return {a(x), {b(x)}}; }
  torch::nn::Linear a{nullptr}, b{nullptr};
};

TEST(Ddp, AnOutputThatTheLossDoesNotUse) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto net = std::make_shared<TwoOutputs>();
    DistributedDataParallel ddp(net, {.mesh = rank.mesh, .find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      ddp->forward(batch_of(rank)).first.square().mean().backward();
      EXPECT_TRUE(net->a->weight.grad().defined());
      EXPECT_FALSE(net->b->weight.grad().defined());
    }
  });
}

TEST(Ddp, AnOutputIsChangedInPlace) {  // what stands for it shares its version counter and graph
  run_on_ranks(2, [](const RankContext& rank) {
    DdpTwins pair(rank, net_of<Mlp>(), {.find_unused_parameters = true});
    ddp_loss(pair.twins.plain->forward(pair.twins.joined).mul_(2)).backward();
    ddp_loss(pair.ddp->forward(pair.twins.part).mul_(2)).backward();
    EXPECT_SAME_GRADS(pair.twins, kClose);
    // tanh keeps its result for backward
    const auto tanh = std::make_shared<TanhLinear>(4);
    DistributedDataParallel ddp(tanh, {.mesh = rank.mesh, .find_unused_parameters = true});
    const auto loss = ddp->forward(batch_of(rank)).mul_(2).sum();
    EXPECT_CONTAINS(error_of([&] { loss.backward(); }), "modified by an inplace operation");
  });
}

TEST(Ddp, NoSyncAddsUp) {  // behaviours 148
  run_on_ranks(2, [](const RankContext& rank) {
    for (const bool as_view : {false, true}) {
      const auto store = c10::make_intrusive<c10d::PrefixStore>(as_view ? "view" : "copy", rank.store);
      const auto group = make_counting_group(store, rank.rank(), 2);
      Twins twins(rank, net_of<Mlp>(), {.shard = false});
      DistributedDataParallel ddp(
          twins.sharded, {.mesh = DeviceMesh::from_group(group, torch::kCPU), .gradient_as_bucket_view = as_view});
      for (int step = 0; step < 2; ++step) {
        const auto before = counts_of(group).num_all_reduces();
        {
          const auto outer = ddp->no_sync();
          { const auto inner = ddp->no_sync(); }
          ddp_loss(ddp->forward(twins.part)).backward();
        }
        ddp_loss(twins.plain->forward(twins.joined)).backward();
        EXPECT_EQ(counts_of(group).num_all_reduces(), before);
        twins.next_batch();
        ddp_loss(twins.plain->forward(twins.joined)).backward();
        ddp_loss(ddp->forward(twins.part)).backward();
        EXPECT_EQ(counts_of(group).num_all_reduces(), before + 1);
        EXPECT_SAME_GRADS(twins, kClose);
        twins.zero_grad();
      }
    }
  });
}

struct NormNet : torch::nn::Module {
  NormNet() {
    linear = register_module("linear", torch::nn::Linear(4, 3));
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    fill_parameters(*linear, 2);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

at::Tensor of_rank0(const at::Tensor& own, const ProcessGroup& group) {
  std::vector<at::Tensor> sent{own.detach().clone()};
  group->broadcast(sent)->wait();
  return sent.front();
}

TEST(Ddp, BuffersAreRank0s) {  // behaviours 149
  run_on_ranks(2, [](const RankContext& rank) {
    for (const bool broadcasts : {true, false}) {
      const auto net = std::make_shared<NormNet>();
      net->norm->running_mean.fill_(rank.rank());
      DistributedDataParallel ddp(net, {.mesh = rank.mesh, .broadcast_buffers = broadcasts});
      EXPECT_EQ(net->norm->running_mean.sum().item<double>(), 0) << "rank 0's at the start";
      const auto first = ddp->forward(batch_of(rank));
      const auto second = ddp->forward(batch_of(rank));  // the buffers that the first forward saved change in between
      (ddp_loss(first) + ddp_loss(second)).backward();
      const auto mean = net->norm->running_mean.clone();
      const auto of_first = of_rank0(mean, rank.group);
      EXPECT_EQ(at::equal(mean, of_first), rank.rank() == 0) << "each rank saw its own batch";
      const torch::NoGradGuard no_grad;
      ddp->eval();
      (void)ddp->forward(batch_of(rank));
      EXPECT_EQ(at::equal(net->norm->running_mean, of_first), broadcasts || rank.rank() == 0);
      EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 2);
    }
  });
}

TEST(Ddp, GradientsAreViewsOfTheBucket) {  // behaviours 154
  run_on_ranks(2, [](const RankContext& rank) {
    DdpTwins pair(rank, net_of<Mlp>(), {.gradient_as_bucket_view = true});
    const auto& q = pair.twins.q;
    for (const bool set_to_none : {true, false, true, true}) {
      pair.backward();
      EXPECT_SAME_GRADS(pair.twins, kClose);
      for (const auto& parameter : q) EXPECT_TRUE(parameter.grad().is_alias_of(q.front().grad()));
      pair.twins.plain->zero_grad();
      pair.ddp->zero_grad(set_to_none);
    }
  });
}

// One layer runs twice, another one never.
struct StaticNet : torch::nn::Module {
  StaticNet() {
    twice = register_module("twice", torch::nn::Linear(4, 4));
    never = register_module("never", torch::nn::Linear(4, 4));
    fill_parameters(*this, 9);
  }
  at::Tensor forward(const at::Tensor& x, bool changed = false) {
    const auto h = twice(twice(x).tanh());
    return changed ? never(h) : h;
  }
  torch::nn::Linear twice{nullptr}, never{nullptr};
};

TEST(Ddp, StaticGraph) {  // behaviours 155
  run_on_ranks(2, [](const RankContext& rank) {
    const auto net = std::make_shared<StaticNet>(), plain = std::make_shared<StaticNet>();
    DistributedDataParallel ddp(net, {.mesh = rank.mesh, .bucket_cap_mb = kTinyBucketMb, .static_graph = true});
    const auto joined = torch::empty({4, 4}).normal_(0, 1, seeded(3));
    const auto part = joined.chunk(2)[rank.rank()];
    for (int step = 0; step < 4; ++step) {
      ddp_loss(ddp->forward(part)).backward();
      ddp_loss(plain->forward(joined)).backward();
      EXPECT_LE(difference(plain->twice->weight.grad(), net->twice->weight.grad()), kClose) << step;
      EXPECT_FALSE(net->never->weight.grad().defined()) << step;
      ddp->zero_grad();
      plain->zero_grad();
    }
    EXPECT_CONTAINS(error_of([&] { ddp_loss(ddp->forward(part, true)).backward(); }), "training graph has changed");
  });
}

struct Named {
  at::Tensor value;
  template <class Fn>
  void for_each_tensor(const Fn& fn) {
    fn(value);
  }
};
struct Opaque {
  at::Tensor value;
};

// A net whose forward packs its result as `pack` says.
template <class Pack>
struct Packed : torch::nn::Module {
  Packed() {
    used = register_module("used", torch::nn::Linear(4, 2));
    unused = register_module("unused", torch::nn::Linear(4, 2));
  }
  auto forward(const at::Tensor& x) { return Pack()(used(x)); }
  torch::nn::Linear used{nullptr}, unused{nullptr};
};

template <class Pack, class Unpack>
void expect_found(const RankContext& rank, Pack, const Unpack& unpack) {
  const auto net = std::make_shared<Packed<Pack>>();
  DistributedDataParallel ddp(net, {.mesh = rank.mesh, .find_unused_parameters = true});
  for (int step = 0; step < 2; ++step) {
    auto output = ddp->forward(batch_of(rank));
    unpack(output).sum().backward();
  }
  EXPECT_TRUE(net->used->weight.grad().defined());
  EXPECT_FALSE(net->unused->weight.grad().defined());
}

TEST(Ddp, TensorsAreFoundInWhatForwardReturns) {
  run_on_ranks(2, [](const RankContext& rank) {
    using Tensors = std::vector<at::Tensor>;
    expect_found(
        rank, [](const at::Tensor& y) { return std::make_tuple(y.detach(), std::make_tuple(y, 3)); },
        [](auto& out) { return std::get<0>(std::get<1>(out)); });
    expect_found(
        rank,
        [](const at::Tensor& y) {
          return std::optional<Tensors>({at::Tensor(), y});
        },
        [](auto& out) { return out->at(1); });
    expect_found(
        rank,
        [](const at::Tensor& y) {
          return std::map<std::string, at::Tensor>{{"y", y}};
        },
        [](auto& out) { return out.at("y"); });
    expect_found(
        rank,
        [](const at::Tensor& y) {
          return std::array<at::Tensor, 2>{y, y};
        },
        [](auto& out) { return out[0] + out[1]; });
    expect_found(
        rank, [](const at::Tensor& y) { return Named{y}; }, [](auto& out) { return out.value; });
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] {
                      expect_found(
                          rank, [](const at::Tensor& y) { return Opaque{y}; }, [](auto& out) { return out.value; });
                    }),
                    "Opaque, in which no tensors can be found");
  });
}

TEST(Ddp, HasTheNamesOfTheModule) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::BatchNorm1d net(3);
    DistributedDataParallel ddp(net, {.mesh = rank.mesh});
    EXPECT_EQ(ddp->named_parameters().keys(), net->named_parameters().keys());
    EXPECT_EQ(ddp->named_buffers().keys(), net->named_buffers().keys());
    EXPECT_EQ(ddp->name(), "DistributedDataParallel<BatchNorm1d>");
    EXPECT_EQ(&unwrapped(*ddp), net.get());
    ddp->eval();
    EXPECT_FALSE(net->is_training());
    EXPECT_TRUE(ddp(torch::ones({2, 3})).defined()) << "called as every holder";
  });
}

TEST(Ddp, SparseGradientsAndSeveralDtypes) {
  struct Net : torch::nn::Module {
    Net() {
      table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 4).sparse(true)));
      wide = register_module("wide", torch::nn::Linear(4, 2));
      wide->to(torch::kDouble);
      fill_parameters(*this, 4);
    }
    at::Tensor forward(const at::Tensor& x) { return wide(table(x).to(torch::kDouble)); }
    torch::nn::Embedding table{nullptr};
    torch::nn::Linear wide{nullptr};
  };
  run_on_ranks(2, [](const RankContext& rank) {
    const auto net = std::make_shared<Net>(), plain = std::make_shared<Net>();
    DistributedDataParallel ddp(net, {.mesh = rank.mesh});
    const auto joined = torch::tensor({{0, 1}, {1, 5}});
    for (int step = 0; step < 2; ++step) {
      ddp_loss(ddp->forward(joined[rank.rank()])).backward();
      ddp_loss(plain->forward(joined)).backward();
      EXPECT_TRUE(net->table->weight.grad().is_sparse());
      EXPECT_LE(difference(plain->table->weight.grad().to_dense(), net->table->weight.grad().to_dense()), kClose);
      EXPECT_LE(difference(plain->wide->weight.grad(), net->wide->weight.grad()), kClose);
      ddp->zero_grad();
      plain->zero_grad();
    }
  });
}

TEST(Ddp, LeavesTheModuleWhenItDies) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(), {.shard = false});
    { const DistributedDataParallel ddp(twins.sharded, {.mesh = rank.mesh}); }
    ddp_loss(twins.sharded->forward(twins.part)).backward();
    const auto own = net_of<Mlp>()();
    ddp_loss(own->forward(twins.part)).backward();
    EXPECT_LE(difference(grads(own->parameters()), grads(twins.q)), 0) << "this rank's alone";
    twins.zero_grad();
    DistributedDataParallel again(twins.sharded, {.mesh = rank.mesh});
    ddp_loss(again->forward(twins.part)).backward();
    ddp_loss(twins.plain->forward(twins.joined)).backward();
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

}  // namespace
}  // namespace fsdp::testing
