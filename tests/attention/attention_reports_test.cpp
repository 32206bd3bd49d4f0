// What users reported of context parallelism elsewhere: values small enough to check by hand.
#include <fsdp/saved_tensor_hooks.h>

#include "attention/attention_kernels.h"
#include "attention/head_exchange.h"
#include "attention_case.h"
#include "support/errors.h"

namespace fsdp::testing {
namespace {

// All queries and keys are 1, values count from 1: attention is the mean of the values so far.
AttentionCase counting_case(int64_t num_tokens, int64_t num_heads, SequenceSplit split) {
  return {.num_tokens = num_tokens,
          .num_heads = num_heads,
          .num_key_heads = num_heads,
          .split = split,
          .batch = 1,
          .head_dim = 1,
          .scale = 1.0};
}

struct CountingResult {
  at::Tensor out, grad_q, grad_k, grad_v;  // [H, S_local]
};

CountingResult run_counting(const RankContext& rank, const AttentionScheme& scheme, const AttentionCase& attention) {
  const auto values = torch::arange(1, attention.num_tokens + 1, torch::kDouble).view({1, 1, -1, 1});
  const auto v = own_rows(values.expand({1, attention.num_heads, -1, 1}), rank, attention.split).requires_grad_();
  const auto q = torch::ones_like(v).requires_grad_(), k = torch::ones_like(v).requires_grad_();
  const auto out = scheme.run(q, k, v, rank.mesh, attention);
  out.sum().backward();
  const auto flat = [](const at::Tensor& tensor) { return tensor.squeeze(3).squeeze(0); };
  return {flat(out), flat(q.grad()), flat(k.grad()), flat(v.grad())};
}

struct NamedCase {
  AttentionScheme scheme;
  AttentionCase attention;
};
std::vector<NamedCase> counting_cases(int64_t num_tokens) {
  std::vector<NamedCase> cases;
  for (const auto split : {SequenceSplit::kContiguous, SequenceSplit::kHeadTail}) {
    for (const auto& scheme : ring_schemes()) cases.push_back({scheme, counting_case(num_tokens, 1, split)});
    cases.push_back({ulysses_scheme(), counting_case(num_tokens, 2, split)});  // a head a rank
  }
  return cases;
}

void expect_rows(const at::Tensor& actual, const std::vector<double>& whole, const RankContext& rank,
                 SequenceSplit split, const std::string& what) {
  const auto positions = local_positions(static_cast<int64_t>(whole.size()), rank.rank(), rank.size(), split);
  const auto expected = torch::tensor(whole, torch::kDouble).index_select(0, positions).expand_as(actual);
  EXPECT_TRUE(at::allclose(actual, expected, 0, 2e-6)) << what << ":\n" << actual << "\nexpected\n" << expected;
}

TEST(AttentionReports, TheCountingInputForwardAndBackward) {
  run_on_ranks(2, [](const RankContext& rank) {
    for (const auto& [scheme, attention] : counting_cases(8)) {
      const auto result = run_counting(rank, scheme, attention);
      const auto what = scheme.name + ", " + attention.describe();
      expect_rows(result.out, {1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5}, rank, attention.split, what);
      expect_rows(result.grad_v, {2.717857, 1.717857, 1.217857, .884524, .634524, .434524, .267857, .125}, rank,
                  attention.split, what);
      expect_rows(result.grad_k, {-2.641071, -.923214, .044643, .595833, .855357, .889881, .741071, .4375}, rank,
                  attention.split, what);
      expect_rows(result.grad_q, std::vector<double>(8, 0.0), rank, attention.split, what);
    }
  });
}

TEST(AttentionReports, SixTokensOnTwoRanks) {
  run_on_ranks(2, [](const RankContext& rank) {
    for (const auto& [scheme, attention] : counting_cases(6)) {
      const auto result = run_counting(rank, scheme, attention);
      expect_rows(result.out, {1, 1.5, 2, 2.5, 3, 3.5}, rank, attention.split, scheme.name);
    }
  });
}

TEST(AttentionReports, QueryHeadsMeetTheirKeyHead) {
  run_on_ranks(4, [](const RankContext& rank) {
    const auto head_numbers = [](int64_t n) {
      return torch::arange(n, torch::kDouble).view({1, n, 1, 1}).expand({1, n, 2, 3}).clone();
    };
    attention::SequenceGroup sequence{rank.group, rank.rank(), {8, 4, SequenceSplit::kContiguous}};
    const auto key_split = attention::split_key_heads(8, 2, 4);
    const auto exchange = c10::make_intrusive<attention::HeadExchange>(
        sequence, std::vector{attention::split_query_heads(8, 4), key_split}, "heads");
    const auto q = head_numbers(8), k = head_numbers(2).requires_grad_();
    const auto heads = exchange_to_heads({q, k}, exchange);
    EXPECT_EQ(heads[0].sizes(), (std::vector<int64_t>{1, 2, 8, 3}));
    EXPECT_EQ(heads[0].select(1, 0).min().item<double>(), 2 * rank.rank());
    EXPECT_EQ(heads[0].select(1, 1).max().item<double>(), 2 * rank.rank() + 1);
    EXPECT_EQ(heads[1].sizes(), (std::vector<int64_t>{1, 1, 8, 3}));
    EXPECT_TRUE(at::equal(heads[1], torch::full_like(heads[1], rank.rank() / 2)));
    heads[1].sum().backward();
    EXPECT_TRUE(at::equal(k.grad(), torch::full_like(k, 2))) << "the sum over two copies";
  });
}

TEST(AttentionReports, PackedDocumentsAreRunOneByOne) {
  run_on_ranks(2, [](const RankContext& rank) {
    const std::vector<int64_t> lengths{4, 12};
    const auto x = torch::empty({1, 2, 16, 4}, torch::kDouble).normal_(0, 1, seeded(8));
    const auto positions = document_positions(lengths, rank.rank(), 2);
    const auto local = x.index_select(2, positions);
    std::vector<at::Tensor> expected, by_ring, by_heads;
    int64_t begin = 0;
    for (const auto length : lengths) {
      const auto document = x.narrow(2, begin, length), rows = local.narrow(2, begin / 2, length / 2);
      expected.push_back(plain_attention(document, document, document, true));
      by_ring.push_back(
          ring_attention(rows, rows, rows, rank.mesh, {.is_causal = true, .split = SequenceSplit::kHeadTail}));
      by_heads.push_back(
          ulysses_attention(rows, rows, rows, rank.mesh, {.is_causal = true, .split = SequenceSplit::kHeadTail}));
      begin += length;
    }
    const auto whole = torch::cat(expected, 2).index_select(2, positions);
    EXPECT_LE(difference(whole, torch::cat(by_ring, 2)), 1e-10);
    EXPECT_LE(difference(whole, torch::cat(by_heads, 2)), 1e-10);
  });
}

TEST(AttentionReports, LogSumExpOfLowPrecisionStaysFloat) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto x = torch::ones({1, 1, 4, 2}, torch::kBFloat16).requires_grad_();
    std::vector<at::ScalarType> saved;
    {
      const SavedTensorHooks hooks([&](const at::Tensor& tensor) {
        saved.push_back(tensor.scalar_type());
        return [tensor] { return tensor; };
      });
      std::ignore = ring_attention(x, x, x, rank.mesh, {.is_causal = true});
    }
    EXPECT_EQ(saved, (std::vector{at::kBFloat16, at::kBFloat16, at::kBFloat16, at::kBFloat16, at::kFloat}));
    const auto part = attention::attention_with_lse(x.detach(), x.detach(), x.detach(), true, 1.0);
    // q k^T is 2 everywhere, so the log-sum-exp of n keys is 2 + log n.
    const auto expected = 2 + torch::arange(1, 5, torch::kFloat).log();
    EXPECT_TRUE(at::allclose(part.lse.flatten(), expected, 0, 1e-6)) << part.lse;
  });
}

}  // namespace
}  // namespace fsdp::testing
