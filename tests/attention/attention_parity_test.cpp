// Every scheme computes plain attention: outputs and gradients, even and uneven lengths, shared key/value heads.
#include <fsdp/activation_checkpoint.h>

#include "attention_case.h"
#include "support/live_bytes.h"

namespace fsdp::testing {
namespace {

constexpr auto kContiguous = SequenceSplit::kContiguous;
constexpr auto kHeadTail = SequenceSplit::kHeadTail;

void on_one_to_four(const std::function<void(const RankContext&)>& body) {
  for (const int size : {1, 2, 3, 4}) run_on_ranks(size, body);
}

// 24 divides by 2, 4, 6 and 8; 13 by none. Of 5 tokens some ranks hold none, or a tail of none.
constexpr int64_t kLengths[] = {24, 13, 5};

TEST(RingAttention, IsPlainAttention) {
  on_one_to_four([](const RankContext& rank) {
    for (const auto& scheme : ring_schemes()) {
      for (const auto dtype : {at::kDouble, at::kFloat}) {
        for (const auto num_tokens : kLengths) {
          for (const int64_t num_key_heads : {4, 2}) {
            AttentionCase attention{.num_tokens = num_tokens, .num_key_heads = num_key_heads, .dtype = dtype};
            expect_plain_attention(rank, scheme, attention);
            attention.split = kHeadTail;
            expect_plain_attention(rank, scheme, attention);
            attention.split = kContiguous;
            attention.is_causal = false;
            expect_plain_attention(rank, scheme, attention);
          }
        }
      }
    }
  });
}

TEST(UlyssesAttention, IsPlainAttention) {
  on_one_to_four([](const RankContext& rank) {
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      for (const auto num_tokens : kLengths) {
        for (const int64_t num_key_heads : {12, rank.size(), 1}) {  // cut, one each, a copy each
          for (const auto split : {kContiguous, kHeadTail}) {
            for (const bool is_causal : {true, false}) {
              expect_plain_attention(rank, ulysses_scheme(),
                                     {.num_tokens = num_tokens,
                                      .num_heads = 12,
                                      .num_key_heads = num_key_heads,
                                      .is_causal = is_causal,
                                      .split = split,
                                      .dtype = dtype});
            }
          }
        }
      }
    }
  });
}

std::vector<AttentionScheme> all_schemes() {
  auto schemes = ring_schemes();
  schemes.push_back(ulysses_scheme());
  return schemes;
}

TEST(ContextParallelAttention, TakesAnyScaleAndOneRowAHead) {
  on_two_and_three([](const RankContext& rank) {
    for (const auto& scheme : all_schemes()) {
      expect_plain_attention(rank, scheme, {.num_heads = 6, .num_key_heads = 6, .head_dim = 1, .scale = 0.3});
      expect_plain_attention(rank, scheme, {.num_tokens = 2, .num_heads = 6, .num_key_heads = 6, .batch = 1});
    }
  });
}

// Kernels work in blocks of 32 to 512 rows; the lengths above are less than one.
TEST(ContextParallelAttention, SpansSeveralBlocksOfTheKernel) {
  run_on_ranks(2, [](const RankContext& rank) {
    for (const auto& scheme : all_schemes()) {
      expect_plain_attention(
          rank, scheme,
          {.num_tokens = 1150, .num_heads = 2, .num_key_heads = 2, .split = kHeadTail, .batch = 1, .head_dim = 8});
    }
  });
}

TEST(ContextParallelAttention, LowPrecisionIsAddedInFloat) {
  run_on_ranks(3, [](const RankContext& rank) {
    for (const auto& scheme : all_schemes()) {
      for (const auto dtype : {at::kBFloat16, at::kHalf}) {
        const AttentionCase attention{.num_heads = 6, .num_key_heads = 3, .split = kHeadTail, .dtype = dtype};
        EXPECT_LE(attention_difference(rank, scheme, attention), dtype == at::kHalf ? 0.006 : 0.05) << scheme.name;
      }
    }
  });
}

TEST(ContextParallelAttention, QueriesOfAnotherLength) {
  on_two_and_three([](const RankContext& rank) {
    const auto generator = seeded(3);
    const auto random = [&](int64_t n) { return torch::empty({2, 6, n, 4}, torch::kDouble).normal_(0, 1, generator); };
    const auto k = random(7), v = random(7);
    const auto own = [&](const at::Tensor& whole) { return own_rows(whole, rank, kContiguous); };
    for (const int64_t num_queries : {5 * rank.size(), 3 * rank.size(), 11}) {  // the last rank has 3 or fewer keys
      const auto q = random(num_queries);
      const auto expected = own(plain_attention(q, k, v, false));
      const auto by_heads =
          ulysses_attention(own(q), own(k), own(v), rank.mesh, {.sequence_length = 7, .query_length = num_queries});
      const auto by_ring = ring_attention(own(q), own(k), own(v), rank.mesh, {.sequence_length = 7});
      EXPECT_LE(difference(expected, by_heads), 1e-10);
      EXPECT_LE(difference(expected, by_ring), 1e-10);
    }
    const auto q = random(5 * rank.size());  // equally many on every rank, and more than keys
    const auto inferred = ulysses_attention(own(q), own(k), own(v), rank.mesh, {.sequence_length = 7});
    EXPECT_LE(difference(own(plain_attention(q, k, v, false)), inferred), 1e-10);
  });
}

struct OwnInputs {
  at::Tensor q, k, v;
};
OwnInputs own_inputs(const RankContext& rank, at::ScalarType dtype = at::kDouble) {
  const auto generator = seeded(40 + rank.rank());
  const auto random = [&] { return torch::empty({1, 6, 4, 3}, torch::kDouble).normal_(0, 1, generator).to(dtype); };
  return {random().requires_grad_(), random().requires_grad_(), random().requires_grad_()};
}

TEST(ContextParallelAttention, UnderACheckpointTheGradientsAreTheSame) {
  on_two_and_three([](const RankContext& rank) {
    for (const auto& scheme : all_schemes()) {
      const AttentionCase attention{.num_tokens = 4 * rank.size(), .num_heads = 6, .num_key_heads = 6};
      const auto plain = own_inputs(rank), dropped = own_inputs(rank);
      scheme.run(plain.q, plain.k, plain.v, rank.mesh, attention).square().sum().backward();
      const auto call = [run = scheme.run, mesh = rank.mesh, attention](const at::Tensor& q, const at::Tensor& k,
                                                                        const at::Tensor& v) {
        return run(q, k, v, mesh, attention).square();
      };
      checkpoint(call, dropped.q, dropped.k, dropped.v).sum().backward();
      EXPECT_TRUE(at::equal(plain.q.grad(), dropped.q.grad())) << scheme.name;
      EXPECT_TRUE(at::equal(plain.k.grad(), dropped.k.grad())) << scheme.name;
      EXPECT_TRUE(at::equal(plain.v.grad(), dropped.v.grad())) << scheme.name;
    }
  });
}

// A second backward over the same graph, and two calls before one backward.
TEST(ContextParallelAttention, GraphsMayBeKeptAndJoined) {
  run_on_ranks(2, [](const RankContext& rank) {
    for (const auto& scheme : all_schemes()) {
      const AttentionCase attention{.num_tokens = 8, .num_heads = 6, .num_key_heads = 6};
      const auto x = own_inputs(rank);
      const auto y = scheme.run(x.q, x.k, x.v, rank.mesh, attention).sum();
      y.backward({}, /*retain_graph=*/true);
      const auto once = x.v.grad().clone();
      y.backward();
      EXPECT_LE(difference(once * 2, x.v.grad()), 1e-12) << scheme.name;
      const auto z =
          scheme.run(x.q, x.k, x.v, rank.mesh, attention).sum() + scheme.run(x.q, x.k, x.v, rank.mesh, attention).sum();
      z.backward();
      EXPECT_LE(difference(once * 4, x.v.grad()), 1e-12) << scheme.name;
    }
  });
}

// Nothing of the size of all queries times all keys, not even of the own ones: [2048, 2048] floats alone are 16 MiB.
TEST(ContextParallelAttention, MemoryGrowsWithTheLengthOnly) {
  for (const auto& scheme : all_schemes()) {
    const LiveBytes bytes;  // of all ranks
    run_on_ranks(2, [&](const RankContext& rank) {
      const auto x = torch::ones({1, 2, 2048, 8}).requires_grad_();
      AttentionCase attention{.num_tokens = 4096, .num_heads = 2, .num_key_heads = 2};
      scheme.run(x, x, x, rank.mesh, attention).sum().backward();
    });
    EXPECT_LT(bytes.peak(), int64_t{16} << 20) << scheme.name;
    EXPECT_GT(bytes.peak(), int64_t{1} << 18) << "nothing was counted";
  }
}

}  // namespace
}  // namespace fsdp::testing
