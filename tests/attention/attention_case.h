#pragma once
// Attention over a sequence spread over ranks against plain attention over the whole of it, in double.
#include <fsdp/ring_attention.h>
#include <fsdp/ulysses_attention.h>

#include <functional>
#include <string>
#include <vector>

#include "support/parity.h"

namespace fsdp::testing {

struct AttentionCase {
  int64_t num_tokens = 24;
  int64_t num_heads = 4;
  int64_t num_key_heads = 4;
  bool is_causal = true;
  SequenceSplit split = SequenceSplit::kContiguous;
  at::ScalarType dtype = at::kDouble;
  int64_t batch = 2;
  int64_t head_dim = 5;
  std::optional<double> scale = std::nullopt;
  [[nodiscard]] std::string describe() const;
};

struct AttentionScheme {
  std::string name;
  std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DeviceMesh& mesh,
                           const AttentionCase& attention)>
      run;
};
[[nodiscard]] AttentionScheme ulysses_scheme();
[[nodiscard]] AttentionScheme ring_scheme(RingRotation rotation);
[[nodiscard]] std::vector<AttentionScheme> ring_schemes();

// softmax(q k^T scale) v with every intermediate spelled out; the oracle.
[[nodiscard]] at::Tensor plain_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
                                         std::optional<double> scale = std::nullopt);

// The rows of `whole` [B, H, S, D] that this rank holds.
[[nodiscard]] at::Tensor own_rows(const at::Tensor& whole, const RankContext& rank, SequenceSplit split);

// Output and all gradients of the scheme on this rank's rows; returns the largest difference to the oracle's.
[[nodiscard]] double attention_difference(const RankContext& rank, const AttentionScheme& scheme,
                                          const AttentionCase& attention);

// double: 1e-10, float: 2e-6.
void expect_plain_attention(const RankContext& rank, const AttentionScheme& scheme, const AttentionCase& attention);

}  // namespace fsdp::testing
