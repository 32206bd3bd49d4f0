#include "train/optimizer_kind.h"

#include <torch/optim.h>

namespace fsdp::train {

namespace {

using Values = OptimizerKind::Values;
namespace optim = torch::optim;

template <class T, class... Ts>
concept OneOf = (std::is_same_v<T, Ts> || ...);

// The fields of each kind, under the names that LibTorch's own serialization uses. visit(name, field, is_required).
template <class V>
void visit_fields(optim::SGDParamState& s, V&& visit) {
  visit("momentum_buffer", s.momentum_buffer(), true);
}
template <OneOf<optim::AdamParamState, optim::AdamWParamState> State, class V>
void visit_fields(State& s, V&& visit) {
  visit("step", s.step(), true);
  visit("exp_avg", s.exp_avg(), true);
  visit("exp_avg_sq", s.exp_avg_sq(), true);
  visit("max_exp_avg_sq", s.max_exp_avg_sq(), false);  // amsgrad
}
template <class V>
void visit_fields(optim::RMSpropParamState& s, V&& visit) {
  visit("step", s.step(), true);
  visit("square_avg", s.square_avg(), true);
  visit("momentum_buffer", s.momentum_buffer(), false);
  visit("grad_avg", s.grad_avg(), false);  // centered
}
template <class V>
void visit_fields(optim::AdagradParamState& s, V&& visit) {
  visit("step", s.step(), true);
  visit("sum", s.sum(), true);
}

template <class V>
void visit_fields(optim::SGDOptions& o, V&& visit) {
  visit("lr", o.lr(), true);
  visit("momentum", o.momentum(), true);
  visit("dampening", o.dampening(), true);
  visit("weight_decay", o.weight_decay(), true);
  visit("nesterov", o.nesterov(), true);
}
template <OneOf<optim::AdamOptions, optim::AdamWOptions> Options, class V>
void visit_fields(Options& o, V&& visit) {
  visit("lr", o.lr(), true);
  visit("betas", o.betas(), true);
  visit("eps", o.eps(), true);
  visit("weight_decay", o.weight_decay(), true);
  visit("amsgrad", o.amsgrad(), true);
}
template <class V>
void visit_fields(optim::RMSpropOptions& o, V&& visit) {
  visit("lr", o.lr(), true);
  visit("alpha", o.alpha(), true);
  visit("eps", o.eps(), true);
  visit("weight_decay", o.weight_decay(), true);
  visit("momentum", o.momentum(), true);
  visit("centered", o.centered(), true);
}
template <class V>
void visit_fields(optim::AdagradOptions& o, V&& visit) {
  visit("lr", o.lr(), true);
  visit("lr_decay", o.lr_decay(), true);
  visit("weight_decay", o.weight_decay(), true);
  visit("initial_accumulator_value", o.initial_accumulator_value(), true);
  visit("eps", o.eps(), true);
}

template <class Fields>
Values read_fields(const Fields& given) {
  auto fields = given;  // visiting wants a mutable one; tensors are handles
  Values values;
  visit_fields(fields, [&](const char* name, const auto& field, bool) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
      if (field.defined()) values.insert(name, c10::IValue(field));
    } else {
      values.insert(name, c10::IValue(field));
    }
  });
  return values;
}

template <class Fields>
void write_fields(Fields& fields, const Values& values) {
  visit_fields(fields, [&](const char* name, auto& field, bool) {
    if (const auto* value = values.find(name)) field = value->to<std::decay_t<decltype(field)>>();
  });
}

bool is_of_type(const c10::IValue& value, const at::Tensor&) { return value.isTensor(); }
bool is_of_type(const c10::IValue& value, int64_t) { return value.isInt(); }
bool is_of_type(const c10::IValue& value, double) { return value.isDouble(); }
bool is_of_type(const c10::IValue& value, bool) { return value.isBool(); }
bool is_of_type(const c10::IValue& value, const std::tuple<double, double>&) {
  return value.isTuple() && value.toTupleRef().size() == 2 && value.toTupleRef().elements()[0].isDouble() &&
         value.toTupleRef().elements()[1].isDouble();
}

template <class Fields>
std::string complaint_about_fields(Fields fields, const Values& values) {
  std::string complaint;
  std::vector<std::string> known;
  visit_fields(fields, [&](const char* name, const auto& field, bool is_required) {
    known.emplace_back(name);
    const auto* value = values.find(name);
    if (!value && is_required) complaint = c10::str("'", name, "' is missing");
    if (value && !is_of_type(*value, field)) complaint = c10::str("'", name, "' is given as ", value->tagKind());
  });
  for (const auto& item : values) {
    if (std::find(known.begin(), known.end(), item.key()) == known.end())
      complaint = c10::str("'", item.key(), "' is none of ", c10::Join(", ", known));
  }
  return complaint;
}

template <class State, class Options>
class KindOf : public OptimizerKind {
 public:
  explicit KindOf(bool needs_state = false) : needs_state_(needs_state) {}

  Values read_state(const optim::OptimizerParamState& state) const override {
    return read_fields(static_cast<const State&>(state));
  }
  std::unique_ptr<optim::OptimizerParamState> make_state(const Values& values) const override {
    auto state = std::make_unique<State>();
    write_fields(*state, values);
    return state;
  }
  Values read_options(const optim::OptimizerOptions& options) const override {
    return read_fields(static_cast<const Options&>(options));
  }
  void write_options(optim::OptimizerOptions& options, const Values& values) const override {
    write_fields(static_cast<Options&>(options), values);
  }
  std::string complaint_about_state(const Values& values) const override {
    if (values.is_empty() && !needs_state_) return "";
    return complaint_about_fields(State(), values);
  }
  std::string complaint_about_options(const Values& values) const override {
    return complaint_about_fields(Options(0.0), values);
  }

 private:
  bool needs_state_;
};

template <class Optimizer, class Kind>
const OptimizerKind* if_is(const optim::Optimizer& optimizer, const Kind& kind) {
  return dynamic_cast<const Optimizer*>(&optimizer) ? &kind : nullptr;
}

}  // namespace

const OptimizerKind& kind_of(const optim::Optimizer& optimizer) {
  static const KindOf<optim::SGDParamState, optim::SGDOptions> sgd;
  static const KindOf<optim::AdamParamState, optim::AdamOptions> adam;
  static const KindOf<optim::AdamWParamState, optim::AdamWOptions> adamw;
  static const KindOf<optim::RMSpropParamState, optim::RMSpropOptions> rmsprop;
  static const KindOf<optim::AdagradParamState, optim::AdagradOptions> adagrad(/*needs_state=*/true);
  const OptimizerKind* kind = if_is<optim::SGD>(optimizer, sgd);
  if (!kind) kind = if_is<optim::Adam>(optimizer, adam);
  if (!kind) kind = if_is<optim::AdamW>(optimizer, adamw);
  if (!kind) kind = if_is<optim::RMSprop>(optimizer, rmsprop);
  if (!kind) kind = if_is<optim::Adagrad>(optimizer, adagrad);
  TORCH_CHECK_NOT_IMPLEMENTED(kind || !dynamic_cast<const optim::LBFGS*>(&optimizer),
                              "the state of LBFGS is one history over all parameters, flattened into vectors: it has "
                              "no part that belongs to one parameter's name. Start it anew after loading the weights");
  TORCH_CHECK_NOT_IMPLEMENTED(kind,
                              "optimizer state by name is known for SGD, Adam, AdamW, RMSprop and Adagrad of "
                              "torch::optim and classes derived from them, not for this optimizer");
  return *kind;
}

}  // namespace fsdp::train
