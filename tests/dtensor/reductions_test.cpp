// One number out of a sharded tensor: as from the whole, whatever the dtype and however little a rank holds.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor over_rows(const at::Tensor& tensor, const RankContext& rank) {
  return distribute_tensor(tensor, rank.mesh, {Shard{0}}, std::nullopt).tensor();
}

void expect_same_value(const at::Tensor& plain, const at::Tensor& sharded, const std::string& what) {
  EXPECT_EQ(plain.scalar_type(), sharded.scalar_type()) << what;
  EXPECT_LE(difference(plain.to(torch::kDouble), whole(sharded).to(torch::kDouble)), 1e-3) << what;
}

// Two rows on three ranks: the last one has none.
TEST(Reductions, AnEmptyPartChangesNothing) {
  run_on_ranks(3, [](const RankContext& rank) {
    for (const auto dtype : {torch::kBool, torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong,
                             torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble}) {
      for (const auto& values : {std::vector<int64_t>{3, 5}, {0, 0}, {-3, -5}}) {
        const auto plain = torch::tensor(values).to(dtype);
        const auto sharded = over_rows(plain, rank);
        const auto what = c10::str(dtype, " ", values);
        expect_same_value(plain.min(), sharded.min(), what);
        expect_same_value(plain.max(), sharded.max(), what);
        expect_same_value(plain.sum(), sharded.sum(), what);
        expect_same_value(plain.all(), sharded.all(), what);
        expect_same_value(plain.any(), sharded.any(), what);
        if (!at::isFloatingType(dtype)) continue;
        expect_same_value(plain.mean(), sharded.mean(), what);
        for (const double p : {0.0, 1.0, 2.0, 3.0, kInfinity, -kInfinity})
          expect_same_value(plain.norm(p), sharded.norm(p), what + " norm " + std::to_string(p));
      }
    }
  });
}

TEST(Reductions, FollowTheDtypeTheyAreAskedFor) {
  run_on_ranks(3, [](const RankContext& rank) {
    for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat}) {
      const auto plain = torch::tensor({2.5F, -1.5F}).to(dtype);
      const auto sharded = over_rows(plain, rank);
      for (const double p : {0.0, 1.0, 2.0, kInfinity, -kInfinity}) {
        const auto what = c10::str(dtype, " norm ", p);
        expect_same_value(at::norm(plain, p, torch::kDouble), at::norm(sharded, p, torch::kDouble), what);
        expect_same_value(at::linalg_vector_norm(plain, p, std::nullopt, false, torch::kDouble),
                          at::linalg_vector_norm(sharded, p, std::nullopt, false, torch::kDouble), what);
        expect_same_value(at::_foreach_norm({plain}, p, torch::kDouble)[0],
                          at::_foreach_norm({sharded}, p, torch::kDouble)[0], what);
        expect_same_value(at::_foreach_norm({plain}, p)[0], at::_foreach_norm({sharded}, p)[0], what);
      }
      expect_same_value(plain.sum(torch::kDouble), sharded.sum(torch::kDouble), "sum");
      expect_same_value(plain.mean(torch::kDouble), sharded.mean(torch::kDouble), "mean");
    }
  });
}

TEST(Reductions, IntoAGivenTensor) {
  on_two_and_three([](const RankContext& rank) {
    const auto plain = torch::arange(5.0);
    auto out = torch::zeros({});
    at::linalg_vector_norm_out(out, over_rows(plain, rank));
    EXPECT_NEAR(out.item<double>(), plain.norm().item<double>(), 1e-5);
  });
}

// A part's sum, or the square of its norm, is beyond half precision; the result is not.
TEST(Reductions, OfHalfPrecisionDoNotOverflowOnTheWay) {
  on_two_and_three([](const RankContext& rank) {
    const auto plain = torch::full({6, 40}, 1000, torch::kHalf);
    const auto sharded = over_rows(plain, rank);
    expect_same_value(plain.mean(), sharded.mean(), "mean");
    for (const double p : {2.0, 3.0}) expect_same_value(plain.norm(p), sharded.norm(p), "norm");
  });
}

TEST(Reductions, ReadTogetherKeepTheirDtypes) {
  on_two_and_three([](const RankContext& rank) {
    const auto sharded = over_rows(torch::tensor({2.5F, 1.0F, 0.0F}), rank);
    const auto chosen = at::where(sharded.any(), sharded.max(), torch::zeros({}));
    EXPECT_EQ(chosen.item<double>(), 2.5);
  });
}

// Only a sum of sums and the like need not know the value of the inner one.
TEST(Reductions, OfReductionsKnowTheInnerValue) {
  on_two_and_three([](const RankContext& rank) {
    for (const auto& values : {std::vector<float>{3, 4, -5}, {-1, 0, 0}, {0, -1, -1}, {2, 2, 2}}) {
      const auto plain = torch::tensor(values);
      const auto sharded = over_rows(plain, rank);
      const auto what = c10::str(values);
      const std::vector<std::function<at::Tensor(const at::Tensor&)>> reductions{
          [](const at::Tensor& t) { return t.sum(); },           [](const at::Tensor& t) { return t.mean(); },
          [](const at::Tensor& t) { return t.min(); },           [](const at::Tensor& t) { return t.max(); },
          [](const at::Tensor& t) { return t.all(); },           [](const at::Tensor& t) { return t.any(); },
          [](const at::Tensor& t) { return t.norm(); },          [](const at::Tensor& t) { return t.norm(0); },
          [](const at::Tensor& t) { return t.norm(kInfinity); }, [](const at::Tensor& t) { return t.norm(-kInfinity); },
      };
      for (size_t inner = 0; inner < reductions.size(); ++inner) {
        for (size_t outer = 0; outer < reductions.size(); ++outer) {
          const auto expected = reductions[inner](plain), actual = reductions[inner](sharded);
          const bool takes_bool = outer != 1 && outer < 6;
          if (expected.scalar_type() == torch::kBool && !takes_bool) continue;
          expect_same_value(reductions[outer](expected), reductions[outer](actual),
                            c10::str(what, ": ", inner, ", then ", outer));
        }
      }
    }
  });
}

TEST(Reductions, KeepNaNsOfAnyRank) {
  for (int size : {2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      for (const auto dtype : {torch::kHalf, torch::kFloat, torch::kDouble}) {
        for (int64_t where = 0; where < rank.size(); ++where) {
          auto plain = torch::arange(1, rank.size() + 1).to(dtype);
          plain[where] = std::numeric_limits<double>::quiet_NaN();
          const auto sharded = over_rows(plain, rank);
          for (const auto& value : {sharded.min(), sharded.max(), sharded.norm(kInfinity), sharded.norm(-kInfinity)})
            EXPECT_TRUE(std::isnan(value.item<double>())) << dtype << ", rank " << where;
        }
      }
    });
  }
}

TEST(Reductions, OfNothing) {
  on_two_and_three([](const RankContext& rank) {
    const auto empty = over_rows(torch::zeros({0, 3}), rank);
    EXPECT_EQ(empty.sum().item<double>(), 0);
    EXPECT_EQ(empty.norm().item<double>(), 0);
    EXPECT_TRUE(std::isnan(empty.mean().item<double>()));
    EXPECT_THROW((void)empty.max(), c10::Error);
    EXPECT_THROW((void)empty.norm(kInfinity), c10::Error);
  });
}

TEST(Reductions, OfListsAreNoWorkPartByPart) {
  on_two_and_three([](const RankContext& rank) {
    const std::vector<at::Tensor> plain{torch::arange(12.0).view({4, 3}), torch::arange(6.0).view({3, 2}) - 7};
    std::vector<at::Tensor> sharded;
    for (const auto& t : plain) sharded.push_back(over_rows(t, rank));
    EXPECT_LE(difference(at::_foreach_max(plain), at::_foreach_max(sharded)), 0);
    const auto last = plain[1].t().contiguous();
    EXPECT_LE(difference(at::_foreach_mm({plain[1]}, {last}), at::_foreach_mm({sharded[1]}, {last})), 0);
    const auto parts = at::_foreach_erfc(sharded);
    EXPECT_LE(difference(at::_foreach_erfc(plain), parts), kClose);
    for (const auto& part : parts) EXPECT_TRUE(DTensor::is(part));
  });
}

}  // namespace
}  // namespace fsdp::testing
