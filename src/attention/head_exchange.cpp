#include "attention/head_exchange.h"

#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "comm/collectives.h"

namespace fsdp::attention {

HeadSplit split_query_heads(int64_t num_heads, int64_t num_ranks) {
  TORCH_CHECK_VALUE(num_heads % num_ranks == 0, "ulysses_attention: ", num_heads,
                    " query heads cannot be dealt evenly to ", num_ranks,
                    " ranks: use a number of ranks that divides the heads, or ring_attention");
  return {num_ranks, 1, num_heads / num_ranks};
}

HeadSplit split_key_heads(int64_t num_query_heads, int64_t num_heads, int64_t num_ranks) {
  if (num_heads % num_ranks == 0) return {num_ranks, 1, num_heads / num_ranks};
  TORCH_CHECK_VALUE(num_ranks % num_heads == 0, "ulysses_attention: ", num_query_heads, " query heads and ", num_heads,
                    " key/value heads cannot be dealt to ", num_ranks, " ranks: the ", num_heads,
                    " must be a multiple of the ranks, or divide them (then they are copied); or use ring_attention");
  return {num_heads, num_ranks / num_heads, 1};
}

HeadExchange::HeadExchange(SequenceGroup sequence, std::vector<HeadSplit> splits, std::string what)
    : sequence_(std::move(sequence)),
      splits_(std::move(splits)),
      what_(std::move(what)),
      num_rows_(sequence_.shards.num_rows(sequence_.rank)) {
  for (const auto& split : splits_) heads_.push_back(split.heads);
  num_heads_ = std::accumulate(heads_.begin(), heads_.end(), int64_t{0});
}

std::vector<int64_t> HeadExchange::counts_by_rank(int64_t row_numel) const {
  auto counts = sequence_.shards.rows_by_rank();
  for (auto& count : counts) count *= row_numel;
  return counts;
}

std::vector<at::Tensor> HeadExchange::to_heads(at::TensorList tokens) const {
  const auto num_ranks = sequence_.num_ranks();
  const auto batch = tokens[0].size(0), dim = tokens[0].size(3);
  const auto row_numel = batch * num_heads_ * dim;
  auto sent = at::empty({num_ranks, num_rows_, batch, num_heads_, dim}, tokens[0].options());
  const auto sent_parts = sent.split_with_sizes(heads_, 3);
  for (size_t i = 0; i < splits_.size(); ++i) {
    const auto [num_blocks, copies, heads] = splits_[i];
    const auto blocks =
        tokens[i].unflatten(1, {num_blocks, heads}).permute({1, 3, 0, 2, 4});  // [blocks, S_local, B, h, D]
    sent_parts[i].unflatten(0, {num_blocks, copies}).copy_(blocks.unsqueeze(1));
  }
  auto received = at::empty({sequence_.shards.length, batch, num_heads_, dim}, sent.options());
  const std::vector<int64_t> sent_counts(num_ranks, num_rows_ * row_numel);
  comm::all_to_all(received, counts_by_rank(row_numel), sent, sent_counts, sequence_.group, what_).wait();

  return in_sequence_order(received).permute({1, 2, 0, 3}).split_with_sizes(heads_, 1);  // [B, h, S, D]
}

std::vector<at::Tensor> HeadExchange::to_tokens(at::TensorList heads) const {
  const auto num_ranks = sequence_.num_ranks();
  const auto batch = heads[0].size(0), dim = heads[0].size(3);
  const auto row_numel = batch * num_heads_ * dim;
  const auto sent = in_rank_order(heads);
  auto received = at::empty({num_ranks, num_rows_, batch, num_heads_, dim}, sent.options());
  const std::vector<int64_t> received_counts(num_ranks, num_rows_ * row_numel);
  comm::all_to_all(received, received_counts, sent, counts_by_rank(row_numel), sequence_.group, what_).wait();

  auto parts = received.split_with_sizes(heads_, 3);
  for (size_t i = 0; i < splits_.size(); ++i) {
    const auto copies = parts[i].unflatten(0, {splits_[i].num_blocks, splits_[i].copies});
    const auto blocks = splits_[i].copies == 1 ? copies.select(1, 0) : copies.sum(1);  // [blocks, S_local, B, h, D]
    // Laid out as scaled_dot_product_attention lays out its result: the heads of a token together.
    parts[i] = blocks.permute({2, 1, 0, 3, 4}).flatten(2, 3).transpose(1, 2);
  }
  return parts;
}

at::Tensor HeadExchange::in_sequence_order(const at::Tensor& gathered) const {
  if (sequence_.shards.split == SequenceSplit::kContiguous) return gathered;
  auto ordered = at::empty_like(gathered);
  for (const auto& run : sequence_.shards.runs()) {
    ordered.narrow(0, run.position, run.length).copy_(gathered.narrow(0, run.gathered, run.length));
  }
  return ordered;
}

at::Tensor HeadExchange::in_rank_order(at::TensorList heads) const {
  if (heads.size() == 1 && sequence_.shards.split == SequenceSplit::kContiguous) {
    return heads[0].permute({2, 0, 1, 3}).contiguous();  // no copy for the result of a kernel when B is 1
  }
  auto gathered =
      at::empty({sequence_.shards.length, heads[0].size(0), num_heads_, heads[0].size(3)}, heads[0].options());
  const auto parts = gathered.split_with_sizes(heads_, 2);
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto rows = heads[i].permute({2, 0, 1, 3});  // [S, B, h, D]
    for (const auto& run : sequence_.shards.runs()) {
      parts[i].narrow(0, run.gathered, run.length).copy_(rows.narrow(0, run.position, run.length));
    }
  }
  return gathered;
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr const char* kExchange = "exchange";

c10::intrusive_ptr<HeadExchange> exchange_of(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<HeadExchange>(context->saved_data[kExchange].toCapsule());
}

template <bool kToHeads>
struct Exchange : Function<Exchange<kToHeads>> {
  static variable_list forward(AutogradContext* context, at::TensorList given,
                               const c10::intrusive_ptr<HeadExchange>& exchange) {
    // The results share memory, but no result is a view of another: in-place changes need no care of autograd.
    const at::AutoDispatchBelowADInplaceOrView below_views;
    context->saved_data[kExchange] = at::IValue::make_capsule(exchange);
    return kToHeads ? exchange->to_heads(given) : exchange->to_tokens(given);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    auto given = Exchange<!kToHeads>::apply(at::TensorList(grads), exchange_of(context));
    given.emplace_back();  // none for the exchange
    return given;
  }
};

}  // namespace

std::vector<at::Tensor> exchange_to_heads(at::TensorList tokens, const c10::intrusive_ptr<HeadExchange>& exchange) {
  return Exchange</*kToHeads=*/true>::apply(tokens, exchange);
}

std::vector<at::Tensor> exchange_to_tokens(at::TensorList heads, const c10::intrusive_ptr<HeadExchange>& exchange) {
  return Exchange</*kToHeads=*/false>::apply(heads, exchange);
}

}  // namespace fsdp::attention
