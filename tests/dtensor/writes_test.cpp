// A write to a sharded parameter is never lost, whichever op makes it and whichever alias it goes through.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

using Write = std::function<void(const at::Tensor&)>;

struct NamedWrite {
  const char* name;
  Write write;
};

at::Tensor square_source() { return torch::arange(256.0, torch::kFloat).view({16, 16}) / 256; }

std::vector<NamedWrite> all_writes() {
  const auto source = square_source();
  return {
      {"copy_", [=](const at::Tensor& p) { p.copy_(source); }},
      {"fill_", [](const at::Tensor& p) { p.fill_(3); }},
      {"view_fill_", [](const at::Tensor& p) { p.view({-1}).fill_(2); }},
      {"row_fill_", [](const at::Tensor& p) { p[0].fill_(5); }},
      {"last_row_fill_", [](const at::Tensor& p) { p[15].fill_(5); }},
      {"transposed_mul_", [](const at::Tensor& p) { p.t().mul_(2); }},
      {"data_narrow_fill_", [](const at::Tensor& p) { p.data().narrow(0, 2, 9).fill_(9); }},
      {"detach_mul_", [](const at::Tensor& p) { p.detach().mul_(2); }},
      {"data_mul_", [](const at::Tensor& p) { p.data().mul_(2); }},
      {"chunk_fill_", [](const at::Tensor& p) { p.chunk(2)[1].fill_(4); }},
      {"index_put_", [](const at::Tensor& p) { p.detach().index_put_({0}, 1.5); }},
      {"add_out",
       [=](const at::Tensor& p) {
         auto out = p.detach();
         at::add_out(out, source, source);
       }},
      {"mm_out",
       [=](const at::Tensor& p) {
         auto out = p.detach();
         at::mm_out(out, source, source);
       }},
      {"clamp_", [](const at::Tensor& p) { p.clamp_(-0.1, 0.1); }},
      {"lerp_", [=](const at::Tensor& p) { p.lerp_(source, 0.5); }},
      {"add_", [=](const at::Tensor& p) { p.add_(source); }},
      {"foreach_mul_", [](const at::Tensor& p) { at::_foreach_mul_({p}, 2.0); }},
      {"foreach_add_", [=](const at::Tensor& p) { at::_foreach_add_({p}, std::vector<at::Tensor>{source}, 0.5); }},
      {"init_eye_", [](const at::Tensor& p) { torch::nn::init::eye_(p); }},
      {"init_constant_", [](const at::Tensor& p) { torch::nn::init::constant_(p, 0.25); }},
      {"set_data", [=](const at::Tensor& p) { at::Tensor(p).set_data(source.clone()); }},
      {"sort_out",
       [=](const at::Tensor& p) {
         auto values = p.detach();
         auto indices = torch::empty({0}, torch::kLong);
         at::sort_out(values, indices, source, 1, /*descending=*/true);
       }},
      {"masked_fill_", [=](const at::Tensor& p) { p.masked_fill_(source > 0.5, 7); }},
      {"split_of_a_view_zero_",
       [](const at::Tensor& p) {
         p.view({4, 64}).split(2)[1].zero_();
       }},
  };
}

// How the parameter lies when the write comes.
enum class State { kSharded, kGathered, kGatheredView };

class Writes : public ::testing::TestWithParam<std::tuple<size_t, State>> {};

TEST_P(Writes, ReachTheShards) {
  const auto [which, state] = GetParam();
  const auto write = all_writes()[which].write;
  for (int size : {1, 2, 3}) {
    run_on_ranks(size, [&, state = state](const RankContext& rank) {
      Twins twins(rank, square_mlp(), {.reshard_after_forward = state == State::kSharded});
      const torch::NoGradGuard no_grad;
      if (state == State::kGathered) {
        twins.sharded->forward(twins.part);
      }
      at::Tensor view;
      if (state == State::kGatheredView) {
        view = twins.q[2].t();
      }
      const auto version = twins.q[2]._version();
      write(twins.p[2]);
      write(twins.q[2]);
      EXPECT_TRUE(DTensor::is(twins.q[2]));
      EXPECT_GE(twins.q[2]._version(), version);
      EXPECT_SAME_PARAMETERS(twins, 1e-6);
      if (view.defined()) {
        EXPECT_LE(difference(twins.p[2].t(), view + 0), 1e-6);
      }
      EXPECT_LE(difference(twins.plain->forward(twins.part), twins.sharded->forward(twins.part)), 1e-5);
    });
  }
}

std::string write_name(const ::testing::TestParamInfo<Writes::ParamType>& info) {
  const char* states[] = {"sharded", "gathered", "viewed"};
  return std::string(all_writes()[std::get<0>(info.param)].name) + "_" +
         states[static_cast<int>(std::get<1>(info.param))];
}

INSTANTIATE_TEST_SUITE_P(AllKinds, Writes,
                         ::testing::Combine(::testing::Range(size_t{0}, all_writes().size()),
                                            ::testing::Values(State::kSharded, State::kGathered, State::kGatheredView)),
                         write_name);

TEST(Writes, ReturnTheHandleTheyWereGiven) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const torch::NoGradGuard no_grad;
    auto& p = twins.q[2];
    EXPECT_TRUE(p.mul_(2).is_same(p));
    EXPECT_TRUE(p.copy_(square_source()).is_same(p));
    EXPECT_TRUE(p.clamp_(0, 1).is_same(p));
    EXPECT_TRUE(p.lerp_(square_source(), 0.5).is_same(p));
    EXPECT_TRUE(at::add_out(p, square_source(), square_source()).is_same(p));
  });
}

TEST(Writes, BumpTheVersion) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const torch::NoGradGuard no_grad;
    auto& p = twins.q[2];
    for (const Write& write :
         {Write([](const at::Tensor& t) { t.mul_(2); }), Write([](const at::Tensor& t) { t.view({-1}).fill_(1); }),
          Write([](const at::Tensor& t) { t.copy_(square_source()); }),
          Write([](const at::Tensor& t) { at::_foreach_add_({t}, 1.0); })}) {
      const auto before = p._version();
      write(p);
      EXPECT_GT(p._version(), before);
    }
  });
}

TEST(Writes, IntoAPlainTensorFromASharded) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const torch::NoGradGuard no_grad;
    auto plain = torch::zeros({16, 16});
    plain.copy_(twins.q[2]);
    EXPECT_FALSE(DTensor::is(plain));
    EXPECT_LE(difference(twins.p[2], plain), 0);
    at::add_out(plain, twins.q[2], twins.q[2]);
    EXPECT_LE(difference(twins.p[2] * 2, plain), 0);
    plain.zero_().add_(twins.q[2]);
    EXPECT_LE(difference(twins.p[2], plain), 0);
  });
}

TEST(Writes, OfUnevenAndEmptyShards) {
  for (int size : {2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>());
      const torch::NoGradGuard no_grad;
      twins.both([](TestNet& net, const at::Tensor&) {
        for (auto& p : net.parameters()) {
          p.mul_(2);
          p.view({-1}).narrow(0, 1, 2).fill_(4);
          p.copy_(p.flip(0) + 1);
          p[p.size(0) - 1].zero_();
        }
      });
      EXPECT_SAME_PARAMETERS(twins, 1e-6);
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
