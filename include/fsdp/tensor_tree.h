#pragma once
// Visits the tensors inside what a module takes or returns: a tensor, and any nesting of tuple, pair, array, vector,
// optional and map.
//
//   auto [output, state] = lstm->forward(x);                                      // a tuple within a tuple
//   fsdp::for_each_tensor(state, [](at::Tensor& tensor) { tensor = tensor.detach(); });
//
// A struct takes part when it has a member `template <class Fn> void for_each_tensor(const Fn& fn)` that calls `fn`
// with each of its tensors. PyTorch: torch.utils._pytree, as FSDP2 and DDP use it on inputs and outputs.
#include <ATen/core/Tensor.h>
#include <fsdp/version.h>

#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdp {

namespace detail {

struct IgnoreTensor {
  void operator()(at::Tensor&) const {}
};

template <class T>
concept HasOwnVisit = requires(T& value) {
  value.for_each_tensor(IgnoreTensor());
};

template <class T>
struct MayHoldTensors : std::bool_constant<HasOwnVisit<T>> {};
template <>
struct MayHoldTensors<at::Tensor> : std::true_type {};
template <class T>
struct MayHoldTensors<std::optional<T>> : MayHoldTensors<T> {};
template <class T>
struct MayHoldTensors<std::vector<T>> : MayHoldTensors<T> {};
template <class T, size_t N>
struct MayHoldTensors<std::array<T, N>> : MayHoldTensors<T> {};
template <class A, class B>
struct MayHoldTensors<std::pair<A, B>> : std::disjunction<MayHoldTensors<A>, MayHoldTensors<B>> {};
template <class... Ts>
struct MayHoldTensors<std::tuple<Ts...>> : std::disjunction<MayHoldTensors<Ts>...> {};
template <class K, class V>
struct MayHoldTensors<std::map<K, V>> : MayHoldTensors<V> {};
template <class K, class V>
struct MayHoldTensors<std::unordered_map<K, V>> : MayHoldTensors<V> {};

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};
template <class T>
concept MapLike = requires {
  typename T::mapped_type;
};

}  // namespace detail

// Whether for_each_tensor() can find tensors in a T. It passes over everything else.
template <class T>
inline constexpr bool kMayHoldTensors = detail::MayHoldTensors<T>::value;

// fn(at::Tensor&) for each tensor in `value`, undefined ones too, in order; `fn` may assign another one.
template <class T, class Fn>
void for_each_tensor([[maybe_unused]] T& value, [[maybe_unused]] const Fn& fn) {
  if constexpr (!kMayHoldTensors<T>) {
    return;
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    fn(value);
  } else if constexpr (detail::HasOwnVisit<T>) {
    value.for_each_tensor(fn);
  } else if constexpr (detail::TupleLike<T>) {
    std::apply([&fn](auto&... items) { (for_each_tensor(items, fn), ...); }, value);
  } else if constexpr (detail::MapLike<T>) {
    for (auto& entry : value) for_each_tensor(entry.second, fn);
  } else if constexpr (requires { value.has_value(); }) {
    if (value.has_value()) for_each_tensor(*value, fn);
  } else {
    for (auto& item : value) for_each_tensor(item, fn);
  }
}

}  // namespace fsdp
