#pragma once
// How checkpoint() keeps the arguments of a function until backward.
//
//   Kept<std::vector<at::Tensor>> kept(arguments);   // in forward
//   kept.get();                                      // in backward: the same values, requiring grad as they did
//
// Tensors are kept as autograd keeps what it saves, so that an enclosing checkpoint drops them as well and a change in
// place is noticed. Everything else is copied.
#include <fsdp/version.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace fsdp::parallel {

template <class T>
class Kept {
 public:
  explicit Kept(const T& value) : value_(value) {}
  [[nodiscard]] const T& get() const { return value_; }
  void add_devices(std::vector<c10::Device>&) const {}

 private:
  T value_;
};

template <>
class Kept<at::Tensor> {
 public:
  explicit Kept(const at::Tensor& tensor);
  [[nodiscard]] at::Tensor get() const;  // cut off from the graph before it. Errors: c10::Error when changed in place
  void add_devices(std::vector<c10::Device>& devices) const;

 private:
  torch::autograd::SavedVariable saved_;
  std::optional<c10::Device> device_;
  bool requires_grad_ = false;
};

template <class T>
class Kept<std::optional<T>> {
 public:
  explicit Kept(const std::optional<T>& value) {
    if (value) value_.emplace(*value);
  }
  [[nodiscard]] std::optional<T> get() const { return value_ ? std::optional<T>(value_->get()) : std::nullopt; }
  void add_devices(std::vector<c10::Device>& devices) const {
    if (value_) value_->add_devices(devices);
  }

 private:
  std::optional<Kept<T>> value_;
};

template <class T>
class Kept<std::vector<T>> {
 public:
  explicit Kept(const std::vector<T>& values) {
    for (const auto& value : values) values_.emplace_back(value);
  }
  [[nodiscard]] std::vector<T> get() const {
    std::vector<T> values;
    for (const auto& value : values_) values.push_back(value.get());
    return values;
  }
  void add_devices(std::vector<c10::Device>& devices) const {
    for (const auto& value : values_) value.add_devices(devices);
  }

 private:
  std::vector<Kept<T>> values_;
};

// std::tuple and std::pair.
template <class Tuple, class... Ts>
class KeptTuple {
 public:
  explicit KeptTuple(const Tuple& value)
      : values_(std::apply([](const auto&... item) { return std::tuple<Kept<Ts>...>(Kept<Ts>(item)...); }, value)) {}
  [[nodiscard]] Tuple get() const {
    return std::apply([](const auto&... item) { return Tuple{item.get()...}; }, values_);
  }
  void add_devices(std::vector<c10::Device>& devices) const {
    std::apply([&](const auto&... item) { (item.add_devices(devices), ...); }, values_);
  }

 private:
  std::tuple<Kept<Ts>...> values_;
};

template <class... Ts>
class Kept<std::tuple<Ts...>> : public KeptTuple<std::tuple<Ts...>, Ts...> {
  using KeptTuple<std::tuple<Ts...>, Ts...>::KeptTuple;
};

template <class A, class B>
class Kept<std::pair<A, B>> : public KeptTuple<std::pair<A, B>, A, B> {
  using KeptTuple<std::pair<A, B>, A, B>::KeptTuple;
};

// An array is kept as the vector of its items.
template <class T, size_t N>
class Kept<std::array<T, N>> : Kept<std::vector<T>> {
 public:
  explicit Kept(const std::array<T, N>& values) : Kept<std::vector<T>>({values.begin(), values.end()}) {}
  [[nodiscard]] std::array<T, N> get() const {
    std::array<T, N> values;
    auto items = Kept<std::vector<T>>::get();
    for (size_t i = 0; i < N; ++i) values[i] = std::move(items[i]);
    return values;
  }
  using Kept<std::vector<T>>::add_devices;
};

}  // namespace fsdp::parallel
