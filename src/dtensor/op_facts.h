#pragma once
// What the dispatch rules know about an operator: its rule from the table, and what its schema says. Computed once per
// operator; nothing on the hot path compares names.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

namespace fsdp::dtensor {

enum class Rule {
  kGather,     // anything without a rule: compute on the gathered tensor; writes go back to the shards
  kAlias,      // another handle of the same state: detach, alias
  kNothing,    // returns its argument: detach_
  kMetadata,   // looks at sizes and options only, or changes flags of the handle: never gathers
  kLocal,      // asks about the memory of this rank's part: is_pinned
  kShape,      // another tensor takes the shape or options of a sharded one: view_as, type_as
  kPointwise,  // runs shard by shard, also over lists (foreach and fused optimizer ops)
  kLike,       // factories shaped like a sharded tensor
  kRandom,     // fills with random numbers: the numbers the full tensor would get
  kRandomLike,
  kReduce,       // one number out of a tensor; the collective waits until it is read
  kStack,        // keeps unread reductions together, so that they are read by one collective
  kConvert,      // to, contiguous, cpu: nothing to do when nothing changes
  kShallowCopy,  // the check in front of Tensor::set_data
  kSet,          // Tensor::set_ of a sharded tensor, as torch::load(module) issues it
  kRefuse,
};

// How kReduce combines what the ranks have.
enum class Reduction { kNone, kSum, kMean, kMin, kMax, kAll, kAny, kNorm };

struct OpFacts {
  Rule rule = Rule::kGather;
  Reduction reduction = Reduction::kNone;
  std::string name;                     // "aten::add_.Tensor", for messages
  const char* refusal = nullptr;        // why, and what to do instead
  bool writes = false;                  // any argument
  bool casts_inputs = false;            // mixed precision: floating arguments that meet a parameter follow its dtype
  bool is_add_inplace = false;          // aten::add_.Tensor, which may be queued behind a pending gradient
  bool is_addcdiv_inplace = false;      // aten::addcdiv_, the last op of most optimizers
  c10::SmallVector<bool, 8> is_write;   // argument i is written to
  c10::SmallVector<int, 4> return_arg;  // the argument that return i is, or -1
};

[[nodiscard]] const OpFacts& facts_of(const c10::OperatorHandle& op);

// The table itself; see rules.cpp.
struct TableEntry {
  Rule rule = Rule::kGather;
  Reduction reduction = Reduction::kNone;
  const char* refusal = nullptr;
};
// Whether `name` computes with parameters, so that mixed precision casts what they meet; see rules.cpp.
[[nodiscard]] bool casts_inputs(const std::string& name);
[[nodiscard]] TableEntry rule_of(const std::string& name, const std::string& overload);

}  // namespace fsdp::dtensor
