// How often the schemes communicate, and what they refuse before they do.
#include <ATen/autocast_mode.h>
#include <fsdp/dtensor.h>

#include "attention_case.h"
#include "comm/group_state.h"
#include "comm/meeting.h"
#include "support/counting_backend.h"
#include "support/errors.h"

namespace fsdp::testing {
namespace {

struct CallCounts {
  int num_all_gathers, num_all_to_alls, num_collectives;
  bool operator==(const CallCounts&) const = default;
};
std::ostream& operator<<(std::ostream& out, const CallCounts& counts) {
  return out << counts.num_all_gathers << " all-gathers, " << counts.num_all_to_alls << " all-to-alls, "
             << counts.num_collectives << " collectives";
}

CallCounts calls_of(const ProcessGroup& group) {
  const auto& counts = counts_of(group);
  return {counts.num_all_gathers(), counts.num_all_to_alls(), counts.num_collectives()};
}

CallCounts operator-(const CallCounts& a, const CallCounts& b) {
  return {a.num_all_gathers - b.num_all_gathers, a.num_all_to_alls - b.num_all_to_alls,
          a.num_collectives - b.num_collectives};
}

// Collectives of a forward and of its backward.
std::pair<CallCounts, CallCounts> count_calls(const RankContext& rank, const AttentionScheme& scheme,
                                              const AttentionCase& attention) {
  const auto group =
      make_counting_group(c10::make_intrusive<c10d::PrefixStore>(scheme.name, rank.store), rank.rank(), rank.size());
  const auto mesh = DeviceMesh::from_group(group, torch::kCPU);
  const auto x = torch::ones({1, 12, 4, 2}).requires_grad_();
  const auto y = scheme.run(x, x, x, mesh, attention);
  const auto forward = calls_of(group);
  y.sum().backward();
  return {forward, calls_of(group) - forward};
}

TEST(RingAttention, CommunicatesAsOftenAsPyTorch) {
  for (const int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [size](const RankContext& rank) {
      for (const bool is_causal : {true, false}) {
        AttentionCase attention{.num_tokens = 4 * size, .num_heads = 12, .num_key_heads = 12, .is_causal = is_causal};
        auto gather = ring_scheme(RingRotation::kAllGather), shift = ring_scheme(RingRotation::kAllToAll);
        for (auto* scheme : {&gather, &shift}) scheme->name += is_causal ? ", causal" : "";
        const auto [gather_forward, gather_backward] = count_calls(rank, gather, attention);
        const auto [shift_forward, shift_backward] = count_calls(rank, shift, attention);
        const CallCounts none{0, 0, 0};
        EXPECT_EQ(gather_forward, size == 1 ? none : (CallCounts{1, 0, 1}));
        EXPECT_EQ(gather_backward, size == 1 ? none : (CallCounts{1, size, 1 + size}));
        EXPECT_EQ(shift_forward, (CallCounts{0, size - 1, size - 1}));
        EXPECT_EQ(shift_backward, size == 1 ? none : (CallCounts{0, 2 * size - 1, 2 * size - 1}));
      }
    });
  }
}

TEST(UlyssesAttention, ExchangesAllInputsAtOnce) {
  for (const int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [size](const RankContext& rank) {
      const AttentionCase attention{.num_tokens = 4 * size, .num_heads = 12, .num_key_heads = 12};
      const auto [forward, backward] = count_calls(rank, ulysses_scheme(), attention);
      const int num_exchanges = size == 1 ? 0 : 2;
      EXPECT_EQ(forward, (CallCounts{0, num_exchanges, num_exchanges}));
      EXPECT_EQ(backward, (CallCounts{0, num_exchanges, num_exchanges}));
    });
  }
}

TEST(ContextParallelAttention, MeetsOnceForEachKindOfCall) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto x = torch::ones({1, 2, 4, 2}).requires_grad_();
    const auto meeting = comm::meeting_of(rank.group);
    for (int i = 0; i < 3; ++i) std::ignore = ring_attention(x, x, x, rank.mesh);
    EXPECT_EQ(meeting->num_meetings(), 1);
    for (int i = 0; i < 3; ++i) std::ignore = ulysses_attention(x, x, x, rank.mesh);
    EXPECT_EQ(meeting->num_meetings(), 2);
  });
}

TEST(ContextParallelAttention, RanksThatDisagreeAllHearOfIt) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto x = torch::ones({1, 2, 4, 2});
    const bool is_first = rank.rank() == 0;
    EXPECT_ERROR(std::ignore = ring_attention(x, x, x, rank.mesh, {.is_causal = is_first}), c10::DistError,
                 is_first ? "not causal" : "causal");
    const auto own = is_first ? x : x.narrow(2, 0, 3);  // without sequence_length: 8 or 6 tokens?
    EXPECT_ERROR(std::ignore = ulysses_attention(own, own, own, rank.mesh), c10::DistError,
                 is_first ? "6 tokens" : "8 tokens");
  });
}

// Each refusal of both functions alike; no rank communicates.
void expect_both_refuse(const RankContext& rank, const std::function<void(const AttentionScheme&)>& body) {
  for (const auto& scheme : {ulysses_scheme(), ring_scheme(RingRotation::kAllGather)}) body(scheme);
  EXPECT_EQ(counts_of(rank.group).num_collectives(), 0);
  EXPECT_EQ(comm::meeting_of(rank.group)->num_meetings(), 0);
}

RankContext counted(RankContext rank) {
  rank.group =
      make_counting_group(c10::make_intrusive<c10d::PrefixStore>("counted", rank.store), rank.rank(), rank.size());
  rank.mesh = DeviceMesh::from_group(rank.group, torch::kCPU);
  return rank;
}

#define EXPECT_REFUSED(q, k, v, attention, type, text) \
  EXPECT_ERROR(std::ignore = scheme.run(q, k, v, rank.mesh, attention), type, text)

TEST(ContextParallelAttention, RefusesInputsThatDoNotFit) {
  run_on_ranks(2, [](const RankContext& plain_rank) {
    const auto rank = counted(plain_rank);
    const auto x = torch::ones({1, 2, 4, 2});
    const AttentionCase fits{.num_tokens = 8, .num_heads = 2, .num_key_heads = 2},
        full{.num_tokens = 8, .num_heads = 2, .num_key_heads = 2, .is_causal = false};
    expect_both_refuse(rank, [&](const AttentionScheme& scheme) {
      EXPECT_REFUSED(at::Tensor(), x, x, fits, c10::ValueError, "q is undefined");
      EXPECT_REFUSED(x, x[0], x, fits, c10::ValueError, "k has 3 dims");
      EXPECT_REFUSED(x, x, x.to(torch::kLong), fits, c10::ValueError, "v is Long, but a floating dtype is needed");
      EXPECT_REFUSED(x, x, x.to(torch::kDouble), fits, c10::ValueError, "Float, Float and Double");
      EXPECT_REFUSED(x.to(torch::kMeta), x, x, fits, c10::ValueError, "q is on meta, but the mesh is of cpu");
      EXPECT_REFUSED(x, x, x.narrow(2, 0, 3), fits, c10::ValueError, "k has sizes [1, 2, 4, 2] and v [1, 2, 3, 2]");
      EXPECT_REFUSED(x, x.narrow(3, 0, 1), x.narrow(3, 0, 1), fits, c10::ValueError,
                     "batch and head_dim must be equal");
      EXPECT_REFUSED(x.narrow(0, 0, 0), x, x, fits, c10::ValueError, "must not be 0");
      EXPECT_REFUSED(x, x.narrow(1, 0, 1), x.narrow(1, 0, 1), fits, c10::ValueError,
                     "2 query heads and 1 key/value heads: set enable_gqa");
      AttentionCase grouped = fits;
      grouped.num_key_heads = 3;
      const auto three = torch::ones({1, 3, 4, 2});
      EXPECT_REFUSED(x, three, three, grouped, c10::ValueError, "2 query heads are no multiple of 3");
      EXPECT_REFUSED(x.narrow(2, 0, 3), x, x, fits, c10::NotImplementedError,
                     "causal attention with 3 queries and 4 keys");
      AttentionCase longer = full;
      longer.num_tokens = 9;
      EXPECT_REFUSED(x, x.narrow(2, 0, 3), x.narrow(2, 0, 3), longer, c10::ValueError, "k has 3 tokens, but rank");
      longer.num_tokens = 0;
      EXPECT_REFUSED(x, x, x, longer, c10::ValueError, "the sequence has 0 tokens");
      const auto sharded = distribute_tensor(x, rank.mesh, {Shard{0}}, std::nullopt).tensor();
      EXPECT_REFUSED(sharded, x, x, fits, c10::TypeError, "q is a DTensor");
      EXPECT_ERROR(std::ignore = scheme.run(x, x, x, DeviceMesh(), fits), c10::ValueError, "the mesh is undefined");
    });
  });
}

TEST(ContextParallelAttention, RefusesAMeshOfTwoDims) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto mesh = mesh_2d(rank, 1, 2, "cp");
    const auto x = torch::ones({1, 2, 4, 2});
    EXPECT_ERROR(std::ignore = ring_attention(x, x, x, mesh), c10::ValueError, "the mesh has 2 dims (shape [1, 2])");
    EXPECT_ERROR(std::ignore = ulysses_attention(x, x, x, mesh), c10::ValueError, "pass mesh[\"cp\"]");
    EXPECT_EQ(ring_attention(x, x, x, mesh["shard"]).sizes(), x.sizes());
  });
}

TEST(RingAttention, RefusesABalanceOfWhatIsBalanced) {
  run_on_ranks(2, [](const RankContext& plain_rank) {
    const auto rank = counted(plain_rank);
    const auto x = torch::ones({1, 2, 4, 2});
    EXPECT_ERROR(std::ignore = ring_attention(x, x, x, rank.mesh, {.split = SequenceSplit::kHeadTail}), c10::ValueError,
                 "head-tail balances causal attention, but is_causal is false");
    EXPECT_EQ(counts_of(rank.group).num_collectives(), 0);
  });
}

TEST(RingAttention, RefusesASecondDerivative) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto x = torch::ones({1, 2, 4, 2}).requires_grad_();
    const auto y = ring_attention(x, x, x, rank.mesh).sum();
    EXPECT_ERROR(std::ignore = torch::autograd::grad({y}, {x}, {}, std::nullopt, /*create_graph=*/true),
                 c10::NotImplementedError, "create_graph through ring_attention");
  });
}

TEST(UlyssesAttention, RefusesHeadsThatCannotBeDealt) {
  run_on_ranks(4, [](const RankContext& plain_rank) {
    const auto rank = counted(plain_rank);
    const auto six = torch::ones({1, 6, 4, 2});
    EXPECT_ERROR(std::ignore = ulysses_attention(six, six, six, rank.mesh), c10::ValueError,
                 "6 query heads cannot be dealt evenly to 4 ranks");
    EXPECT_EQ(counts_of(rank.group).num_collectives(), 0);
  });
  run_on_ranks(2, [](const RankContext& plain_rank) {
    const auto rank = counted(plain_rank);
    const auto q = torch::ones({1, 28, 4, 2}), k = torch::ones({1, 7, 4, 2});
    EXPECT_ERROR(std::ignore = ulysses_attention(q, k, k, rank.mesh, {.enable_gqa = true}), c10::ValueError,
                 "28 query heads and 7 key/value heads cannot be dealt to 2 ranks");
    EXPECT_ERROR(std::ignore = ulysses_attention(q, q, q, rank.mesh, {.query_length = 12}), c10::ValueError,
                 "q has 4 tokens, but rank");
    EXPECT_ERROR(std::ignore = ulysses_attention(q, q, q, rank.mesh, {.is_causal = true, .query_length = 12}),
                 c10::NotImplementedError, "causal attention with 12 queries and 8 keys");
    EXPECT_ERROR(std::ignore = ulysses_attention(q, q, q, rank.mesh, {.dropout_p = 1.5}), c10::ValueError,
                 "dropout_p is 1.5");
    EXPECT_EQ(counts_of(rank.group).num_collectives(), 0);
  });
}

TEST(UlyssesAttention, DropsOut) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto x = torch::ones({1, 2, 8, 2}).requires_grad_();
    EXPECT_EQ(ulysses_attention(x, x, x, rank.mesh, {.dropout_p = 1.0}).abs().sum().item<double>(), 0.0);
    const auto y = ulysses_attention(x, x, x, rank.mesh, {.is_causal = true, .dropout_p = 0.5});
    EXPECT_FALSE(at::allclose(y, torch::ones_like(y))) << "without dropout every value is 1";
    y.sum().backward();
    EXPECT_TRUE(x.grad().isfinite().all().item<bool>());
  });
}

TEST(UlyssesAttention, ItsSecondDerivativeIsThatOfTheKernel) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto x = torch::ones({1, 2, 4, 2}).requires_grad_();
    const auto y = ulysses_attention(x, x, x, rank.mesh).square().sum();
    const auto grad = torch::autograd::grad({y}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
    EXPECT_ERROR(grad.sum().backward(), c10::Error, "not implemented");
  });
}

TEST(ContextParallelAttention, AutocastDecidesWhatTravels) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto x = torch::ones({1, 2, 4, 2}).requires_grad_();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const auto by_ring = ring_attention(x, x, x, rank.mesh);
    const auto by_heads = ulysses_attention(x, x, x, rank.mesh);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(by_ring.scalar_type(), at::kBFloat16);
    EXPECT_EQ(by_heads.scalar_type(), at::kBFloat16);
    (by_ring + by_heads).sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  });
}

}  // namespace
}  // namespace fsdp::testing
