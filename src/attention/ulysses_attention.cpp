#include <fsdp/ulysses_attention.h>

#include "attention/attention_kernels.h"
#include "attention/head_exchange.h"

namespace fsdp {
namespace {

using attention::AttentionInputs;
using attention::HeadExchange;
using attention::HeadSplit;
using attention::SequenceGroup;

constexpr const char* kUlysses = "ulysses_attention";

// Where the queries lie: as the keys do, unless they have another length.
SequenceGroup query_sequence_of(const AttentionInputs& inputs, const SequenceGroup& keys,
                                const UlyssesOptions& options) {
  const bool is_like_keys = inputs.num_queries() == inputs.num_keys();
  if (!options.query_length && is_like_keys) return keys;
  auto queries = keys;
  queries.shards.length = options.query_length.value_or(inputs.num_queries() * keys.num_ranks());
  if (!options.query_length) queries.shards.split = SequenceSplit::kContiguous;  // equally many on every rank
  TORCH_CHECK_VALUE(queries.shards.length >= 1, kUlysses, ": q has no tokens (", inputs.q.sizes(), ")");
  TORCH_CHECK_NOT_IMPLEMENTED(!options.is_causal || queries.shards.length == keys.shards.length, kUlysses,
                              ": causal attention with ", queries.shards.length, " queries and ", keys.shards.length,
                              " keys; it needs equal numbers");
  const auto num_rows = queries.shards.num_rows(keys.rank);
  TORCH_CHECK_VALUE(inputs.num_queries() == num_rows, kUlysses, ": q has ", inputs.num_queries(), " tokens, but rank ",
                    keys.rank, " of ", keys.num_ranks(), " holds ", num_rows, " of ", queries.shards.length);
  return queries;
}

// q, k and v by heads: in one collective, or in two when q has another length.
AttentionInputs by_heads(const AttentionInputs& inputs, const SequenceGroup& keys, const SequenceGroup& queries,
                         const HeadSplit& query_split, const HeadSplit& key_split) {
  const auto& [q, k, v] = inputs;
  const auto exchange = [](const SequenceGroup& sequence, std::vector<HeadSplit> splits, const char* what) {
    return c10::make_intrusive<HeadExchange>(sequence, std::move(splits), c10::str(what, " of ", kUlysses));
  };
  if (queries.shards.length == keys.shards.length) {
    const auto all = exchange_to_heads({q, k, v}, exchange(keys, {query_split, key_split, key_split}, "q, k and v"));
    return {all[0], all[1], all[2]};
  }
  const auto query = exchange_to_heads({q}, exchange(queries, {query_split}, "q"));
  const auto others = exchange_to_heads({k, v}, exchange(keys, {key_split, key_split}, "k and v"));
  return {query[0], others[0], others[1]};
}

}  // namespace

torch::Tensor ulysses_attention(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                                const DeviceMesh& mesh, const UlyssesOptions& options) {
  const attention::AttentionSettings settings{kUlysses,           options.is_causal, options.scale,
                                              options.enable_gqa, options.split,     options.sequence_length};
  const auto inputs = attention::autocast_inputs({q, k, v});
  const auto keys = checked_sequence_group(inputs, mesh, settings);
  TORCH_CHECK_VALUE(options.dropout_p >= 0 && options.dropout_p <= 1, kUlysses, ": dropout_p is ", options.dropout_p,
                    ", but a probability lies in 0 .. 1");
  const auto attend = [&](const AttentionInputs& whole) {
    return attention::whole_attention(whole.q, whole.k, whole.v, options.is_causal, options.scale, options.dropout_p);
  };
  const auto queries = query_sequence_of(inputs, keys, options);
  if (keys.num_ranks() == 1) return attend(inputs);

  const auto query_split = attention::split_query_heads(q.size(1), keys.num_ranks());
  const auto key_split = attention::split_key_heads(q.size(1), k.size(1), keys.num_ranks());
  agree_on_call(inputs, keys, settings, c10::str(", ", queries.shards.length, " queries, dropout ", options.dropout_p));
  const auto out = attend(by_heads(inputs, keys, queries, query_split, key_split));
  const auto back =
      c10::make_intrusive<HeadExchange>(queries, std::vector{query_split}, c10::str("the result of ", kUlysses));
  return exchange_to_tokens({out}, back)[0];
}

}  // namespace fsdp
