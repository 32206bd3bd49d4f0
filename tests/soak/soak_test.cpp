// Random nets, wrappings, world sizes and sequences of calls, each checked against one process. Run by ./dev soak.
//
// A scenario is a seed: FSDP_SOAK_SEED=17 FSDP_SOAK_MINUTES=0 runs that one alone.
#include <iostream>
#include <random>

#include "support/parity.h"

namespace fsdp::testing {
namespace {

constexpr double kTolerance = 1e-6;  // of doubles, after up to 30 steps of SGD

int64_t number_from(const char* variable, int64_t otherwise) {
  const char* value = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe)
  return value == nullptr ? otherwise : std::stoll(value);
}

// The same choices on every rank.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  template <class T>
  const T& one_of(const std::vector<T>& items) {
    return items[static_cast<size_t>(below(static_cast<int64_t>(items.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

NetFactory random_net(Dice& dice) {
  using Kind = Blocks::Kind;
  return dice.one_of<NetFactory>({net_of<Mlp>(), square_mlp(), net_of<Gpt>(2), net_of<Gpt>(3, /*tied=*/true),
                                  net_of<Lstm>(), net_of<Encoder>(), net_of<Blocks>(Kind::kPlain),
                                  net_of<Blocks>(Kind::kNestedInner), net_of<Blocks>(Kind::kRootInBlock),
                                  net_of<Blocks>(Kind::kSiblingGroup), net_of<Blocks>(Kind::kAppliedTwice)});
}

std::optional<ShardPlacementResult> largest_even_dim(const at::Tensor& parameter, int64_t num_shards) {
  const auto sizes = parameter.sizes();
  const auto dim = std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
  if (sizes[dim] % num_shards != 0) return std::nullopt;
  return ShardPlacementResult{Shard{static_cast<int64_t>(dim)}};
}

class Scenario {
 public:
  Scenario(uint64_t seed, const RankContext& rank)
      : dice_(seed), twins_(rank, random_net(dice_), {.dtype = at::kDouble, .shard = false}) {
    wrap(rank);
    optimizer_p_ = sgd(0.02)(unique(twins_.p));
    optimizer_q_ = sgd(0.02)(unique(twins_.q));
  }

  void run() {
    const auto num_actions = 5 + dice_.below(25);
    for (int64_t i = 0; i < num_actions; ++i) {
      act();
      ASSERT_FALSE(::testing::Test::HasFailure()) << log_;
    }
    expect_parameters();
  }

 private:
  static std::vector<at::Tensor> unique(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> once;
    for (const auto& tensor : tensors)
      if (std::none_of(once.begin(), once.end(), [&](const auto& other) { return other.is_same(tensor); }))
        once.push_back(tensor);
    return once;
  }

  void wrap(const RankContext& rank) {
    const bool replicates = rank.size() == 4 && dice_.chance(30);
    const auto mesh = replicates ? mesh_2d(rank, 2, 2, "soak") : rank.mesh;
    const auto num_shards = mesh.size(mesh.ndim() - 1);
    FullyShardOptions options{.mesh = mesh};
    if (dice_.chance(30) && !replicates) options.replicate_below = 20;
    if (dice_.chance(30))
      options.shard_placement_fn = [num_shards](const std::string&, const at::Tensor& parameter) {
        return largest_even_dim(parameter, num_shards);
      };
    for (auto* unit : twins_.sharded->units()) {
      const auto kind = dice_.below(4);
      if (kind == 0) options.reshard_after_forward = {};
      if (kind == 1) options.reshard_after_forward = dice_.chance(50);
      if (kind == 2 && num_shards == 4) options.reshard_after_forward = 2;
      if (unit == twins_.sharded.get() || dice_.chance(80)) modules_.push_back(fully_shard(*unit, options));
    }
  }

  void act() {
    using Action = void (Scenario::*)();
    static const std::vector<std::pair<const char*, Action>> actions{
        {"train", &Scenario::train},
        {"train", &Scenario::train},
        {"accumulate", &Scenario::accumulate},
        {"two forwards", &Scenario::two_forwards},
        {"evaluate", &Scenario::evaluate},
        {"unshard", &Scenario::unshard},
        {"reshard", &Scenario::reshard},
        {"prefetch", &Scenario::prefetch},
        {"settings", &Scenario::settings},
        {"read", &Scenario::expect_parameters},
        {"write", &Scenario::write},
        {"freeze", &Scenario::freeze},
        {"fail", &Scenario::fail},
        {"grad", &Scenario::grad},
        {"penalty", &Scenario::penalty},
    };
    const auto& [name, action] = dice_.one_of(actions);
    log_ += std::string(" ") + name;
    (this->*action)();
  }

  void step() {
    EXPECT_LE(twins_.grad_difference(), kTolerance) << log_;
    optimizer_p_->step();
    optimizer_q_->step();
    twins_.zero_grad();
  }

  void train() {
    twins_.next_batch();
    twins_.backward();
    step();
  }

  void accumulate() {
    const auto num = 2 + dice_.below(2);
    for (int64_t i = 0; i < num; ++i) {
      modules_.back().set_requires_gradient_sync(i + 1 == num);
      modules_.back().set_is_last_backward(i + 1 == num);
      twins_.next_batch();
      twins_.backward();
    }
    step();
  }

  void two_forwards() {
    twins_.both([](TestNet& net, const at::Tensor& x) { (net.loss(x) + net.loss(x) * 0.5).backward(); });
    step();
  }

  void evaluate() {
    const torch::NoGradGuard no_grad;
    const auto expected = twins_.plain->loss(twins_.part);
    EXPECT_LE(difference(expected, twins_.sharded->loss(twins_.part)), kTolerance) << log_;
  }

  void unshard() {
    auto module = dice_.one_of(modules_);
    auto handle = module.unshard(dice_.chance(50));
    if (dice_.chance(50)) handle.wait();
  }

  void reshard() {
    auto module = dice_.one_of(modules_);
    module.reshard();
  }

  void prefetch() {
    std::vector<FSDPModule> list;
    for (auto n = dice_.below(3); n > 0; --n) list.push_back(dice_.one_of(modules_));
    auto module = dice_.one_of(modules_);
    if (dice_.chance(50))
      module.set_modules_to_forward_prefetch(list);
    else
      module.set_modules_to_backward_prefetch(list);
  }

  void settings() {
    auto module = dice_.one_of(modules_);
    const bool yes = dice_.chance(50);
    const auto kind = dice_.below(4);
    if (kind == 0) module.set_reshard_after_forward(yes, dice_.chance(50));
    if (kind == 1) module.set_reshard_after_backward(yes, dice_.chance(50));
    if (kind == 2) module.set_unshard_in_backward(yes);
    if (kind == 3) module.set_reduce_scatter_max_input_buffers(1 + dice_.below(3));
  }

  void expect_parameters() { EXPECT_LE(twins_.parameter_difference(), kTolerance) << log_; }

  void write() {
    const auto index = static_cast<size_t>(dice_.below(static_cast<int64_t>(twins_.p.size())));
    const bool through_view = dice_.chance(50);
    const torch::NoGradGuard no_grad;
    for (auto* parameters : {&twins_.p, &twins_.q}) {
      auto target = (*parameters)[index];
      (through_view ? target.select(0, 0) : target).mul_(0.9);
    }
  }

  void freeze() {
    const auto index = static_cast<size_t>(dice_.below(static_cast<int64_t>(twins_.p.size())));
    const bool trains = dice_.chance(60) || index == 0;  // something must train
    twins_.p[index].requires_grad_(trains);
    twins_.q[index].requires_grad_(trains);
  }

  // An exception in the middle of a forward, on all ranks.
  void fail() {
    twins_.sharded->loss(twins_.part).reset();
    modules_.back().reset_iter_state();
  }

  void grad() {
    const auto trained = [](const std::vector<at::Tensor>& parameters) {
      std::vector<at::Tensor> result;
      for (const auto& parameter : unique(parameters))
        if (parameter.requires_grad()) result.push_back(parameter);
      return result;
    };
    const auto p = torch::autograd::grad({twins_.plain->loss(twins_.joined)}, trained(twins_.p), {}, {}, false, true);
    const auto q = torch::autograd::grad({twins_.sharded->loss(twins_.part)}, trained(twins_.q), {}, {}, false, true);
    EXPECT_LE(difference(p, q), kTolerance) << log_;
  }

  void penalty() {
    // LibTorch's fused attention has no second derivative.
    if (dynamic_cast<Gpt*>(twins_.plain.get()) || dynamic_cast<Encoder*>(twins_.plain.get())) return;
    twins_.both([](TestNet& net, const at::Tensor& x) {
      const auto trained = [&] {
        std::vector<at::Tensor> result;
        for (const auto& parameter : unique(net.parameters()))
          if (parameter.requires_grad()) result.push_back(parameter);
        return result;
      }();
      const auto loss = net.loss(x);
      const auto grads = torch::autograd::grad({loss}, trained, {}, true, /*create_graph=*/true, /*allow_unused=*/true);
      auto total = loss;
      for (const auto& g : grads)
        if (g.defined()) total = total + 0.1 * g.square().sum();
      total.backward();
    });
    step();
  }

  Dice dice_;
  Twins twins_;
  std::vector<FSDPModule> modules_;  // the root last
  std::unique_ptr<torch::optim::Optimizer> optimizer_p_, optimizer_q_;
  std::string log_;
};

TEST(Soak, RandomScenariosEqualOneProcess) {
  const auto minutes = number_from("FSDP_SOAK_MINUTES", 1);
  auto seed = static_cast<uint64_t>(number_from("FSDP_SOAK_SEED", 1));
  const auto start = std::chrono::steady_clock::now();
  auto reported = start;
  int num_scenarios = 0;
  do {
    const int size = 1 + static_cast<int>(seed % 4);
    std::cerr << "seed " << seed << " on " << size << " ranks\r" << std::flush;
    run_on_ranks(size, [&](const RankContext& rank) { Scenario(seed, rank).run(); });
    ASSERT_FALSE(HasFailure()) << "seed " << seed << " on " << size << " ranks";
    ++num_scenarios;
    ++seed;
    const auto now = std::chrono::steady_clock::now();
    if (now - reported < std::chrono::seconds(20)) continue;
    reported = now;
    std::cerr << num_scenarios << " scenarios, next seed " << seed << ", "
              << std::chrono::duration_cast<std::chrono::seconds>(now - start).count() << " s" << std::endl;
  } while (std::chrono::steady_clock::now() - start < std::chrono::minutes(minutes));
  std::cerr << num_scenarios << " scenarios passed" << std::endl;
}

}  // namespace
}  // namespace fsdp::testing
