// distribute_tensor, redistribute and from_local over one and two mesh dims, even, uneven and empty.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

at::Tensor counting(at::IntArrayRef sizes, at::ScalarType dtype = torch::kFloat) {
  return torch::arange(c10::multiply_integers(sizes)).view(sizes).to(dtype);
}

// The part that torch.chunk gives to `rank`, empty where it gives none.
at::Tensor chunk_of(const at::Tensor& tensor, int64_t dim, int64_t size, int64_t rank) {
  const int64_t n = tensor.size(dim), rows = (n + size - 1) / size;
  const int64_t begin = std::min(n, rows * rank), end = std::min(n, begin + rows);
  return tensor.narrow(dim, begin, end - begin);
}

TEST(Placements, RoundTripsOverOneDim) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      for (const std::vector<int64_t>& sizes :
           {std::vector<int64_t>{5, 3}, {8, 4}, {1, 17}, {2}, {3, 2, 2}, {7}, {4, 1, 1, 3}}) {
        const auto tensor = counting(sizes);
        for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
          const auto sharded = distribute_tensor(tensor, rank.mesh, {Shard{dim}}, std::nullopt);
          EXPECT_EQ(sharded.tensor().sizes(), tensor.sizes());
          EXPECT_LE(difference(chunk_of(tensor, dim, rank.size(), rank.rank()), sharded.to_local()), 0);
          EXPECT_LE(difference(tensor, sharded.full_tensor()), 0);
          const auto again = DTensor::from_local(sharded.to_local(), rank.mesh, {Shard{dim}}, sizes);
          EXPECT_LE(difference(tensor, again.full_tensor()), 0);
          EXPECT_EQ(again.placements(), (Placements{Shard{dim}}));
          EXPECT_EQ(again.device_mesh(), rank.mesh);
        }
      }
    });
  }
}

TEST(Placements, SourceRankDecidesTheValues) {
  run_on_ranks(3, [](const RankContext& rank) {
    const auto mine = counting({5, 2}) + 100 * rank.rank();
    EXPECT_LE(difference(counting({5, 2}), distribute_tensor(mine, rank.mesh, {Shard{0}}).full_tensor()), 0);
    EXPECT_LE(difference(counting({5, 2}) + 200, distribute_tensor(mine, rank.mesh, {Replicate{}}, 2).full_tensor()),
              0);
    const auto own = distribute_tensor(mine, rank.mesh, {Shard{0}}, std::nullopt);
    EXPECT_LE(difference(chunk_of(mine, 0, 3, rank.rank()), own.to_local()), 0);
  });
}

TEST(Placements, RedistributeBetweenAnyTwo) {
  on_two_and_three([](const RankContext& rank) {
    const auto tensor = counting({5, 4});
    const std::vector<Placements> all{{Shard{0}}, {Shard{1}}, {Replicate{}}};
    for (const auto& from : all) {
      const auto start = distribute_tensor(tensor, rank.mesh, from, std::nullopt);
      for (const auto& to : all) {
        const auto end = start.redistribute(to);
        EXPECT_EQ(end.placements(), to);
        EXPECT_EQ(end.tensor().sizes(), tensor.sizes());
        EXPECT_LE(difference(tensor, end.full_tensor()), 0) << to_string(from) << " to " << to_string(to);
      }
    }
    // Terms of a sum: rank r holds (r + 1) times the tensor.
    const double total = rank.size() * (rank.size() + 1) / 2.0;
    const auto terms = DTensor::from_local(tensor * (rank.rank() + 1), rank.mesh, {Partial{}});
    for (const auto& to : all) {
      EXPECT_LE(difference(tensor * total, terms.redistribute(to).full_tensor()), 1e-6) << to_string(to);
    }
    const auto largest = DTensor::from_local(tensor * (rank.rank() + 1), rank.mesh, {Partial{"max"}});
    EXPECT_LE(difference(tensor * rank.size(), largest.full_tensor()), 1e-6);
    const auto average = DTensor::from_local(tensor * (rank.rank() + 1), rank.mesh, {Partial{"avg"}});
    EXPECT_LE(difference(tensor * total / rank.size(), average.full_tensor()), 1e-6);
  });
}

TEST(Placements, RoundTripsOverTwoDims) {
  run_on_ranks(4, [](const RankContext& rank) {
    const auto mesh = mesh_2d(rank, 2, 2, "grid");
    const auto tensor = counting({5, 3});
    for (const Placements& placements :
         {Placements{Shard{0}, Shard{1}}, Placements{Replicate{}, Shard{0}}, Placements{Shard{1}, Replicate{}},
          Placements{Shard{0}, Shard{0}}, Placements{Replicate{}, Replicate{}}}) {
      const auto distributed = distribute_tensor(tensor, mesh, placements, std::nullopt);
      EXPECT_LE(difference(tensor, distributed.full_tensor()), 0) << to_string(placements);
      auto local = tensor;
      for (int64_t mesh_dim = 0; mesh_dim < 2; ++mesh_dim) {
        if (const auto* shard = std::get_if<Shard>(&placements[mesh_dim])) {
          local = chunk_of(local, shard->dim, 2, mesh_dim == 0 ? rank.rank() / 2 : rank.rank() % 2);
        }
      }
      EXPECT_LE(difference(local, distributed.to_local()), 0) << to_string(placements);
    }
  });
}

TEST(Placements, Misuse) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto tensor = counting({4, 2});
    EXPECT_THROW((void)distribute_tensor(tensor, rank.mesh, {}, std::nullopt), c10::ValueError);
    EXPECT_THROW((void)distribute_tensor(tensor, rank.mesh, {Shard{0}, Shard{1}}, std::nullopt), c10::ValueError);
    EXPECT_THROW((void)distribute_tensor(tensor, rank.mesh, {Shard{2}}, std::nullopt), c10::Error);
    EXPECT_THROW(DTensor{tensor}, c10::TypeError);
    EXPECT_FALSE(DTensor::is(tensor));
    const auto sharded = distribute_tensor(tensor, rank.mesh, {Shard{0}}, std::nullopt);
    EXPECT_THROW((void)DTensor::from_local(sharded.tensor(), rank.mesh, {Shard{0}}), c10::TypeError);
    EXPECT_THROW((void)DTensor::from_local(tensor, rank.mesh, {Shard{0}}, std::vector<int64_t>{5, 3}), c10::ValueError);
    const auto derived = torch::ones({4, 2}, torch::requires_grad()) * 2;
    EXPECT_THROW((void)distribute_tensor(derived, rank.mesh, {Shard{0}}, std::nullopt), c10::Error);
  });
}

TEST(Placements, ToString) {
  EXPECT_EQ(to_string(Placement{Shard{0}}), "Shard(0)");
  EXPECT_EQ(to_string(Placements{Replicate{}, Shard{0}}), "[Replicate, Shard(0)]");
}

// A tensor without a module: optimizers and clipping on parameters made by distribute_tensor.
TEST(Placements, StandaloneParametersAreOptimized) {
  on_two_and_three([](const RankContext& rank) {
    auto plain = counting({5, 3}) / 15;
    auto sharded = distribute_tensor(plain.clone(), rank.mesh, {Shard{0}}, std::nullopt).tensor();
    for (auto& [name, make] : all_optimizers()) {
      auto p = plain.clone().set_requires_grad(true);
      auto q = sharded.clone().detach().set_requires_grad(true);
      ASSERT_TRUE(DTensor::is(q)) << name;
      auto optimizer_p = make({p}), optimizer_q = make({q});
      for (int step = 0; step < 3; ++step) {
        p.mutable_grad() = counting({5, 3}) / 7 - 1;
        q.mutable_grad() = distribute_tensor(counting({5, 3}) / 7 - 1, rank.mesh, {Shard{0}}, std::nullopt);
        optimizer_p->step();
        optimizer_q->step();
      }
      EXPECT_LE(difference(p, q), 1e-6) << name;
    }
  });
}

// The gradient of a lone tensor is the mean over the ranks, whatever its placement.
TEST(Placements, StandaloneLeavesGetGradients) {
  on_two_and_three([](const RankContext& rank) {
    for (const Placement& placement : {Placement{Shard{0}}, Placement{Replicate{}}}) {
      auto leaf = distribute_tensor(counting({5, 3}), rank.mesh, {placement}, std::nullopt).tensor();
      leaf = leaf.detach().set_requires_grad(true);
      (leaf.tanh().matmul(torch::ones({3, 2})) * (rank.rank() + 1)).sum().backward();
      auto plain = counting({5, 3}).set_requires_grad(true);
      (plain.tanh().matmul(torch::ones({3, 2})) * (rank.size() + 1) / 2).sum().backward();
      EXPECT_LE(difference(plain.grad(), leaf.grad()), kClose) << to_string(placement);
    }
  });
}

// Terms of a sum over one mesh dim, cut over the other.
TEST(Placements, TermsThatAreCutBehaveAsTheWhole) {
  run_on_ranks(4, [](const RankContext& rank) {
    const auto mesh = mesh_2d(rank, 2, 2, "grid");
    const auto tensor = counting({4, 3}) / 12;
    const auto whole_value = tensor * 3;  // ranks (0, c) hold their rows once, ranks (1, c) twice
    const auto fresh = [&] {
      const auto rows = chunk_of(tensor, 0, 2, rank.rank() % 2);
      return DTensor::from_local(rows * (rank.rank() / 2 + 1), mesh, {Partial{}, Shard{0}}).tensor();
    };
    EXPECT_LE(difference(whole_value.t(), fresh().t()), kClose);
    EXPECT_LE(difference(whole_value.matmul(tensor.t()), fresh().matmul(tensor.t())), kClose);
    EXPECT_LE(difference(at::stack({whole_value, whole_value}), at::stack({fresh(), fresh()})), kClose);
    EXPECT_LE(difference(whole_value.sum(), fresh().sum()), kClose);
    const auto written = fresh();
    written.view({-1}).mul_(2);
    EXPECT_LE(difference(whole_value * 2, written), kClose);
    auto plain = whole_value.clone().set_requires_grad(true), leaf = fresh().set_requires_grad(true);
    plain.tanh().sum().backward();
    leaf.tanh().sum().backward();
    EXPECT_LE(difference(plain.grad(), leaf.grad()), kClose);
  });
}

TEST(Placements, TermsTakePartInAGraph) {
  on_two_and_three([](const RankContext& rank) {
    const auto tensor = counting({4, 3}) / 12;
    auto plain = (tensor * rank.size()).set_requires_grad(true);
    auto leaf = DTensor::from_local(tensor, rank.mesh, {Partial{}}).tensor().set_requires_grad(true);
    plain.tanh().sum().backward();
    leaf.tanh().sum().backward();
    EXPECT_LE(difference(plain.grad(), leaf.grad()), kClose);
  });
}

constexpr std::chrono::milliseconds kLoneTimeout{3000};

TEST(Placements, ABackwardOfALoneTensorOnOneRankIsAnError) {
  run_on_ranks(
      2,
      [](const RankContext& rank) {
        auto leaf = distribute_tensor(counting({5, 3}), rank.mesh, {Shard{0}}).tensor().set_requires_grad(true);
        const auto sum = leaf.tanh().sum();
        if (rank.rank() == 0) {
          const auto message = error_of<c10::DistError>([&] { sum.backward(); });
          EXPECT_CONTAINS(message, "reduces the gradient of distributed tensor, but ranks [1] did not come");
          rank.store->set("error seen", std::vector<uint8_t>{1});
        }
        rank.store->wait({"error seen"}, kLoneTimeout);
        leaf.tanh().sum().backward();
        EXPECT_LE(difference(1 - counting({5, 3}).tanh().square(), leaf.grad()), kClose);
      },
      kLoneTimeout);
}

struct WithoutGradient : torch::autograd::Function<WithoutGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    return {at::Tensor()};
  }
};

TEST(Placements, AGradientOnOneRankOnlyIsAnErrorOnAll) {
  run_on_ranks(
      2,
      [](const RankContext& rank) {
        auto leaf = distribute_tensor(counting({5, 3}), rank.mesh, {Shard{0}}).tensor().set_requires_grad(true);
        const auto value = leaf.tanh();
        const auto sum = (rank.rank() == 0 ? value : WithoutGradient::apply(value)).sum();
        const auto message = error_of<c10::DistError>([&] { sum.backward(); });
        EXPECT_CONTAINS(message, "the gradient of distributed tensor");
        WithoutGradient::apply(leaf.tanh()).sum().backward();
        EXPECT_FALSE(leaf.grad().defined());
      },
      kLoneTimeout);
}

}  // namespace
}  // namespace fsdp::testing
