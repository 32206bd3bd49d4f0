#include "support/parity.h"

#include <limits>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace fsdp::testing {

RankContext default_rank_context() {
  auto group = default_group();
  return {group->getStore(), group, init_device_mesh(torch::kCPU, {world_size()}, {"dp"})};
}

void run_on_ranks(int size, const std::function<void(const RankContext&)>& body, std::chrono::milliseconds timeout) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(
      size,
      [&](const ProcessGroup& group, int) {
        at::set_num_threads(1);  // of this rank's ops: the ranks share few cores
        body({store, group, DeviceMesh::from_group(group, torch::kCPU, {"dp"})});
      },
      timeout);
}

void on_two_and_three(const std::function<void(const RankContext&)>& body) {
  for (int size : {2, 3}) {
    run_on_ranks(size, body);
  }
}

DeviceMesh mesh_2d(const RankContext& rank, int64_t rows, int64_t columns, const std::string& name,
                   std::vector<std::string> mesh_dim_names, const std::string& backend,
                   std::chrono::milliseconds timeout) {
  const auto row = rank.rank() / columns, column = rank.rank() % columns;
  const auto group = [&](const std::string& kind, int64_t which, int64_t place, int64_t size) {
    const auto store = c10::make_intrusive<c10d::PrefixStore>(name + kind + std::to_string(which), rank.store);
    return make_process_group(store, static_cast<int>(place), static_cast<int>(size),
                              {.backend = backend, .timeout = timeout});
  };
  return DeviceMesh::from_group({group("column", column, row, rows), group("row", row, column, columns)}, torch::kCPU,
                                torch::arange(rows * columns).view({rows, columns}), std::move(mesh_dim_names));
}

void shard_units(TestNet& net, const FullyShardOptions& options) {
  for (auto* unit : net.units()) fully_shard(*unit, options);
}

void shard_units(TestNet& net, const DeviceMesh& mesh, std::optional<bool> reshard_after_forward) {
  for (auto* unit : net.units()) {
    fully_shard(*unit, {.mesh = mesh, .reshard_after_forward = reshard_after_forward});
  }
}

at::Tensor whole(const at::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  return DTensor::is(tensor) ? DTensor(tensor).full_tensor() : tensor.detach();
}

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double difference_of_plain(const at::Tensor& reference, const at::Tensor& actual) {
  if (reference.sizes() != actual.sizes() || reference.scalar_type() != actual.scalar_type()) {
    return kInfinity;
  }
  if (actual.numel() == 0) {
    return 0.0;
  }
  const auto a = reference.to(torch::kDouble);
  const auto largest = (a - actual.to(torch::kDouble)).abs().max().item<double>();
  const auto scale = std::max(1.0, a.abs().max().item<double>());
  return std::isfinite(largest) ? largest / scale : kInfinity;
}

}  // namespace

double difference(const at::Tensor& reference, const at::Tensor& actual) {
  if (!actual.defined()) {
    return reference.defined() ? kInfinity : 0.0;
  }
  const auto b = whole(actual);  // first: every rank must take part
  return reference.defined() ? difference_of_plain(whole(reference), b) : kInfinity;
}

double own_difference(const std::vector<at::Tensor>& reference, const std::vector<at::Tensor>& actual) {
  const torch::NoGradGuard no_grad;
  double largest = reference.size() == actual.size() ? 0.0 : kInfinity;
  for (size_t i = 0; i < std::min(reference.size(), actual.size()); ++i) {
    if (!reference[i].defined() || !actual[i].defined() || !DTensor::is(actual[i])) {
      largest = std::max(largest, reference[i].defined() || actual[i].defined() ? kInfinity : 0.0);
      continue;
    }
    const DTensor tensor(actual[i]);
    const auto own = distribute_tensor(reference[i].detach(), tensor.device_mesh(), tensor.placements(), std::nullopt);
    largest = std::max(largest, difference_of_plain(own.to_local(), tensor.to_local()));
  }
  return largest;
}

double difference(const std::vector<at::Tensor>& reference, const std::vector<at::Tensor>& actual) {
  double largest = reference.size() == actual.size() ? 0.0 : kInfinity;
  for (size_t i = 0; i < std::min(reference.size(), actual.size()); ++i) {
    largest = std::max(largest, difference(reference[i], actual[i]));
  }
  return largest;
}

std::vector<at::Tensor> grads(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : parameters) {
    result.push_back(parameter.grad());
  }
  return result;
}

double mean_over_ranks(const at::Tensor& scalar, const ProcessGroup& group) {
  std::vector<at::Tensor> sum{scalar.detach().to(torch::kDouble).reshape({1}).clone()};
  group->allreduce(sum)->wait();
  return sum[0].item<double>() / group->getSize();
}

namespace {

// Without the repetitions that Module::parameters() gives for tied ones.
std::vector<at::Tensor> distinct_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : module.parameters()) {
    const auto same = [&](const at::Tensor& other) { return other.is_same(parameter); };
    if (std::none_of(result.begin(), result.end(), same)) {
      result.push_back(parameter);
    }
  }
  return result;
}

}  // namespace

Twins::Twins(RankContext context, const NetFactory& make, const Options& options)
    : rank(std::move(context)), plain(make()), sharded(make()), options_(options) {
  if (options.dtype != torch::kFloat) {
    plain->to(options.dtype);
    sharded->to(options.dtype);
  }
  if (options.shard) {
    shard_units(*sharded, rank.mesh, options.reshard_after_forward);
  }
  p = distinct_parameters(*plain);
  q = distinct_parameters(*sharded);
  next_batch();
}

void Twins::next_batch() {
  const auto rows = options_.rows_per_rank;
  joined = plain->batch(rows * rank.size(), seeded(100 + num_batches_++));
  if (joined.is_floating_point()) {
    joined = joined.to(options_.dtype);
  }
  part = joined.narrow(0, rank.rank() * rows, rows);
}

void Twins::backward() {
  both([](TestNet& net, const at::Tensor& x) { net.loss(x).backward(); });
}

void Twins::zero_grad() {
  plain->zero_grad();
  sharded->zero_grad();
}

double Twins::grad_difference() const { return difference(grads(p), grads(q)); }

double Twins::parameter_difference() const { return difference(p, q); }

OptimizerFactory sgd(double learning_rate) {
  return [=](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(learning_rate));
  };
}

namespace {

template <class Optimizer, class Options>
NamedOptimizer named(const std::string& name, const Options& options) {
  return {name, [=](std::vector<at::Tensor> parameters) {
            return std::make_unique<Optimizer>(std::move(parameters), options);
          }};
}

}  // namespace

std::vector<NamedOptimizer> all_optimizers() {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace)
  return {
      named<SGD>("SGD", SGDOptions(0.05)),
      named<SGD>("SGD_momentum_decay", SGDOptions(0.05).momentum(0.9).dampening(0.1).weight_decay(0.01)),
      named<SGD>("SGD_nesterov", SGDOptions(0.05).momentum(0.9).nesterov(true)),
      named<Adam>("Adam", AdamOptions(1e-2)),
      named<Adam>("Adam_amsgrad_decay", AdamOptions(1e-2).amsgrad(true).weight_decay(0.01)),
      named<AdamW>("AdamW", AdamWOptions(1e-2).weight_decay(0.1)),
      named<RMSprop>("RMSprop", RMSpropOptions(1e-3)),
      named<RMSprop>("RMSprop_centered_momentum", RMSpropOptions(1e-3).centered(true).momentum(0.9)),
      named<Adagrad>("Adagrad", AdagradOptions(1e-2).lr_decay(0.01)),
  };
}

void expect_same_training(Twins& twins, const TrainOptions& options) {
  auto optimizer_p = options.optimizer(twins.p);
  auto optimizer_q = options.optimizer(twins.q);
  for (int step = 0; step < options.num_steps; ++step) {
    twins.zero_grad();
    double losses[2] = {0, 0};
    int which = 0;
    twins.both([&](TestNet& net, const at::Tensor& x) {
      if (options.before_step) {
        options.before_step(net, step);
      }
      if (options.backward) {
        options.backward(net, x);
      } else {
        auto loss = net.loss(x);
        loss.backward();
        losses[which] = which == 0 ? loss.item<double>() : mean_over_ranks(loss, twins.rank.group);
        ++which;
      }
      if (options.after_backward) options.after_backward(net);
    });
    EXPECT_NEAR(losses[0], losses[1], options.tolerance * std::max(1.0, std::abs(losses[0]))) << "loss, step " << step;
    EXPECT_LE(own_difference(grads(twins.p), grads(twins.q)), options.tolerance) << "gradients, step " << step;
    if (options.before_update) {
      options.before_update(twins.p);
      options.before_update(twins.q);
    }
    optimizer_p->step();
    optimizer_q->step();
    if (options.compare_parameters) {
      EXPECT_LE(own_difference(twins.p, twins.q), options.tolerance) << "parameters, step " << step;
    }
    twins.next_batch();
  }
  if (options.compare_parameters) {
    EXPECT_LE(twins.parameter_difference(), options.tolerance) << "gathered at the end";
  }
}

}  // namespace fsdp::testing
