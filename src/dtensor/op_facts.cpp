#include "dtensor/op_facts.h"

#include <shared_mutex>

#include "comm/immortal.h"

namespace fsdp::dtensor {

namespace {

OpFacts read_facts(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  OpFacts facts;
  facts.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  const auto entry = rule_of(schema.name(), schema.overload_name());
  facts.rule = entry.rule;
  facts.reduction = entry.reduction;
  facts.refusal = entry.refusal;
  facts.casts_inputs = entry.rule == Rule::kPointwise || casts_inputs(schema.name());
  facts.is_add_inplace = facts.name == "aten::add_.Tensor";
  facts.is_addcdiv_inplace = facts.name == "aten::addcdiv_";
  const auto& arguments = schema.arguments();
  for (const auto& argument : arguments) {
    const auto* alias = argument.alias_info();
    facts.is_write.push_back(alias && alias->isWrite());
    facts.writes |= facts.is_write.back();
  }
  for (const auto& result : schema.returns()) {
    int found = -1;
    const auto* alias = result.alias_info();
    for (size_t i = 0; alias && alias->isWrite() && i < arguments.size(); ++i) {
      const auto* candidate = arguments[i].alias_info();
      if (candidate && *candidate == *alias) found = static_cast<int>(i);
    }
    facts.return_arg.push_back(found);
  }
  return facts;
}

// Immutable once inserted; shared by all threads because operators are.
struct FactsCache {
  std::shared_mutex mutex;
  std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<const OpFacts>> facts;
};

}  // namespace

const OpFacts& facts_of(const c10::OperatorHandle& op) {
  static comm::Immortal<FactsCache> immortal;  // ops may still run in other threads at exit
  auto& cache = immortal.get();
  const auto* key = &op.schema();
  {
    const std::shared_lock lock(cache.mutex);
    const auto found = cache.facts.find(key);
    if (found != cache.facts.end()) return *found->second;
  }
  auto facts = std::make_unique<const OpFacts>(read_facts(op));
  const std::unique_lock lock(cache.mutex);
  return *cache.facts.emplace(key, std::move(facts)).first->second;
}

}  // namespace fsdp::dtensor
