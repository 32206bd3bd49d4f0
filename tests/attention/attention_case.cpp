#include "attention_case.h"

#include <cmath>

namespace fsdp::testing {

std::string AttentionCase::describe() const {
  return c10::str(num_tokens, " tokens, ", num_heads, "/", num_key_heads, " heads, ", is_causal ? "causal" : "full",
                  split == SequenceSplit::kHeadTail ? ", head-tail, " : ", contiguous, ", dtype);
}

AttentionScheme ulysses_scheme() {
  return {"ulysses", [](const auto& q, const auto& k, const auto& v, const auto& mesh, const auto& attention) {
            return ulysses_attention(q, k, v, mesh,
                                     {.is_causal = attention.is_causal,
                                      .scale = attention.scale,
                                      .enable_gqa = attention.num_heads != attention.num_key_heads,
                                      .split = attention.split,
                                      .sequence_length = attention.num_tokens});
          }};
}

AttentionScheme ring_scheme(RingRotation rotation) {
  return {rotation == RingRotation::kAllGather ? "ring by all-gather" : "ring by all-to-all",
          [rotation](const auto& q, const auto& k, const auto& v, const auto& mesh, const auto& attention) {
            return ring_attention(q, k, v, mesh,
                                  {.is_causal = attention.is_causal,
                                   .scale = attention.scale,
                                   .enable_gqa = attention.num_heads != attention.num_key_heads,
                                   .split = attention.split,
                                   .rotation = rotation,
                                   .sequence_length = attention.num_tokens});
          }};
}

std::vector<AttentionScheme> ring_schemes() {
  return {ring_scheme(RingRotation::kAllGather), ring_scheme(RingRotation::kAllToAll)};
}

at::Tensor plain_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
                           std::optional<double> scale) {
  const auto group = q.size(1) / k.size(1);
  const auto keys = k.repeat_interleave(group, 1), values = v.repeat_interleave(group, 1);
  auto scores = q.matmul(keys.transpose(2, 3)) * scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))));
  if (is_causal) {
    const auto hidden = torch::ones({q.size(2), k.size(2)}, torch::kBool).triu(1);
    scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
  }
  return scores.softmax(-1).matmul(values);
}

at::Tensor own_rows(const at::Tensor& whole, const RankContext& rank, SequenceSplit split) {
  return whole.index_select(2, local_positions(whole.size(2), rank.rank(), rank.size(), split));
}

double attention_difference(const RankContext& rank, const AttentionScheme& scheme, const AttentionCase& attention) {
  const auto generator = seeded(17);
  const auto random = [&](int64_t num_heads) {
    return torch::empty({attention.batch, num_heads, attention.num_tokens, attention.head_dim}, torch::kDouble)
        .normal_(0, 1, generator);
  };
  const std::vector<at::Tensor> inputs{random(attention.num_heads), random(attention.num_key_heads),
                                       random(attention.num_key_heads)};
  const auto grad = random(attention.num_heads);
  std::vector<at::Tensor> whole, local;
  for (const auto& input : inputs) {
    whole.push_back(input.clone().requires_grad_());
    local.push_back(own_rows(input, rank, attention.split).to(attention.dtype).requires_grad_());
  }
  const auto expected = plain_attention(whole[0], whole[1], whole[2], attention.is_causal, attention.scale);
  expected.backward(grad);
  const auto actual = scheme.run(local[0], local[1], local[2], rank.mesh, attention);
  EXPECT_EQ(actual.scalar_type(), attention.dtype);
  actual.backward(own_rows(grad, rank, attention.split).to(attention.dtype));

  std::vector<at::Tensor> references{own_rows(expected, rank, attention.split)}, results{actual.to(torch::kDouble)};
  for (size_t i = 0; i < inputs.size(); ++i) {
    references.push_back(own_rows(whole[i].grad(), rank, attention.split));
    results.push_back(local[i].grad().to(torch::kDouble));
  }
  if (actual.numel() == 0) return 0;
  return difference(references, results);
}

void expect_plain_attention(const RankContext& rank, const AttentionScheme& scheme, const AttentionCase& attention) {
  const double tolerance = attention.dtype == at::kDouble ? 1e-10 : 2e-6;
  EXPECT_LE(attention_difference(rank, scheme, attention), tolerance)
      << scheme.name << " on rank " << rank.rank() << " of " << rank.size() << ": " << attention.describe();
}

}  // namespace fsdp::testing
