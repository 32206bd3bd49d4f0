// Whole training loops, with the things that programs do between their steps.
#include <ATen/autocast_mode.h>

#include "support/parity.h"

namespace fsdp::testing {
namespace {

OptimizerFactory adamw(double decay = 0.1) {
  return [=](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                                 torch::optim::AdamWOptions(1e-2).weight_decay(decay));
  };
}

TEST(Training, FrozenParametersStayAndGetNoGradient) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(), {.shard = false});
    for (auto* net : {twins.plain.get(), twins.sharded.get()}) {
      net->parameters()[0].set_requires_grad(false);  // one of a group
      net->parameters()[2].set_requires_grad(false);  // a whole group
      net->parameters()[3].set_requires_grad(false);
    }
    shard_units(*twins.sharded, rank.mesh);
    EXPECT_FALSE(twins.q[0].requires_grad());
    expect_same_training(twins, {.optimizer = adamw()});
    EXPECT_FALSE(twins.q[2].grad().defined());
  });
}

TEST(Training, FreezingAndUnfreezingBetweenSteps) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    expect_same_training(twins, {.before_step = [](TestNet& net, int step) {
                           for (auto& parameter : net.parameters()) {
                             parameter.set_requires_grad(true);
                           }
                           net.parameters()[step % 6].set_requires_grad(false);
                           if (step % 4 == 3) {  // a whole group
                             net.parameters()[2].set_requires_grad(false);
                             net.parameters()[3].set_requires_grad(false);
                           }
                         }});
  });
}

TEST(Training, UnusedParametersDoNotMoveUnderWeightDecay) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const auto bias = whole(twins.q[3]);
    expect_same_training(twins,
                         {.num_steps = 4, .optimizer = adamw(), .backward = [](TestNet& net, const at::Tensor& x) {
                            const auto w = net.parameters();
                            at::linear(at::linear(x, w[0]), w[2]).square().mean().backward();
                          }});
    EXPECT_FALSE(twins.q[3].grad().defined());
    EXPECT_FALSE(twins.q[4].grad().defined()) << "a group that was never used";
    EXPECT_LE(difference(bias, twins.q[3]), 0);
  });
}

TEST(Training, HeadUsedInTheSecondForwardOnlyOrInTheFirst) {
  on_two_and_three([](const RankContext& rank) {
    for (bool head_first : {false, true}) {
      Twins twins(rank, square_mlp());
      expect_same_training(twins, {.num_steps = 4, .backward = [=](TestNet& net, const at::Tensor& x) {
                                     const auto w = net.parameters();
                                     auto body = at::linear(x, w[0], w[1]).tanh();
                                     auto whole_net = net.forward(x * 0.5);
                                     auto loss = head_first ? whole_net.square().mean() + body.mean()
                                                            : body.mean() + whole_net.square().mean();
                                     loss.backward();
                                   }});
      Twins bodies(rank, square_mlp());
      bodies.both([](TestNet& net, const at::Tensor& x) {
        const auto w = net.parameters();
        at::linear(x, w[0], w[1]).tanh().mean().backward();
      });
      EXPECT_FALSE(bodies.q[4].grad().defined());
      EXPECT_SAME_GRADS(bodies, kClose);
    }
  });
}

TEST(Training, EvaluationWithoutGradBetweenSteps) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Gpt>(), {.rows_per_rank = 1});
    expect_same_training(twins, {.num_steps = 5, .before_step = [&](TestNet& net, int) {
                                   const torch::NoGradGuard no_grad;
                                   net.eval();
                                   const auto reference = twins.plain->loss(twins.joined);
                                   EXPECT_NEAR(net.loss(twins.joined).item<double>(), reference.item<double>(), 1e-5);
                                   net.train();
                                 }});
  });
}

TEST(Training, InferenceModeThenTraining) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    {
      const c10::InferenceMode inference;
      const auto y = twins.sharded->forward(twins.joined);
      EXPECT_LE(difference(twins.plain->forward(twins.joined), y), kClose);
    }
    expect_same_training(twins, {.num_steps = 3});
  });
}

TEST(Training, ChildCalledDirectlyAfterTheRoot) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    expect_same_training(twins, {.num_steps = 4, .backward = [](TestNet& net, const at::Tensor& x) {
                                   net.loss(x).backward();
                                   auto& first = *Twins::as<Mlp>(net).layers->ptr(0)->as<torch::nn::LinearImpl>();
                                   first.forward(x).square().mean().backward();
                                 }});
  });
}

class WithEncode : public Mlp {
 public:
  using Mlp::Mlp;
  at::Tensor encode(const at::Tensor& x) { return layers->ptr(0)->as<torch::nn::LinearImpl>()->forward(x).sigmoid(); }
  at::Tensor loss(const at::Tensor& x) override { return encode(x).square().mean(); }
};

TEST(Training, MethodOtherThanForward) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<WithEncode>());
    expect_same_training(twins, {.num_steps = 4});
  });
}

TEST(Training, ModelTurnedToDoubleAfterWrapping) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    const auto handle = twins.q[0];
    expect_same_training(twins, {.num_steps = 2});  // gradients and accumulators of the old dtype exist
    twins.zero_grad();
    twins.plain->to(torch::kDouble);
    twins.sharded->to(torch::kDouble);
    EXPECT_TRUE(DTensor::is(handle));
    EXPECT_EQ(handle.scalar_type(), torch::kDouble);
    EXPECT_EQ(DTensor(handle).to_local().scalar_type(), torch::kDouble);
    {
      const torch::NoGradGuard no_grad;  // equal to the last bit, so that double precision can be asked for
      for (size_t i = 0; i < twins.p.size(); ++i) {
        twins.p[i].copy_(whole(twins.q[i]));
      }
    }
    expect_same_training(twins, {.tolerance = 1e-10, .backward = [](TestNet& net, const at::Tensor& x) {
                                   net.loss(x.to(torch::kDouble)).backward();
                                 }});
    EXPECT_EQ(twins.q[0].grad().scalar_type(), torch::kDouble);
    EXPECT_LE(twins.parameter_difference(), 1e-12);
  });
}

TEST(Training, ToThatChangesNothing) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const auto gathers = twins.stats().num_all_gathers;
    twins.sharded->to(torch::kCPU);
    twins.sharded->to(torch::kFloat);
    EXPECT_EQ(twins.stats().num_all_gathers, gathers);
    EXPECT_TRUE(DTensor::is(twins.q[0]));
    expect_same_training(twins, {.num_steps = 3});
  });
}

TEST(Training, AliasWrittenWhileGathered) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.reshard_after_forward = false});
    const torch::NoGradGuard no_grad;
    const auto same_output = [&](const char* what) {
      EXPECT_LE(difference(twins.plain->forward(twins.part), twins.sharded->forward(twins.part)), kClose) << what;
    };
    same_output("before");
    twins.both([](TestNet& net, const at::Tensor&) { net.parameters()[0].detach().mul_(2); });
    same_output("detach().mul_");
    twins.both([](TestNet& net, const at::Tensor&) { net.parameters()[2].data().mul_(2); });
    same_output("data().mul_");
    twins.both([](TestNet& net, const at::Tensor&) { net.parameters()[4].view({-1}).mul_(2); });
    same_output("view().mul_");
  });
}

TEST(Training, WriteDiscardsAGatherInFlight) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    expect_same_training(twins, {.num_steps = 2});  // learns what follows what
    const auto part_of_forward = [](TestNet& net, const at::Tensor& x, int64_t layers) {
      auto h = x;
      for (int64_t i = 0; i < layers; ++i) {
        h = (Twins::as<Mlp>(net).layers->begin() + i)->forward(h);
      }
      return h;
    };
    const torch::NoGradGuard no_grad;
    twins.both([&](TestNet& net, const at::Tensor& x) {
      part_of_forward(net, x, 3);
      for (auto& parameter : net.parameters()) {
        parameter.mul_(1.5);
      }
    });
    EXPECT_LE(difference(part_of_forward(*twins.plain, twins.part, 5), part_of_forward(*twins.sharded, twins.part, 5)),
              kClose);
  });
}

TEST(Training, ViewHeldOverAStepFollowsTheParameter) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    std::vector<at::Tensor> views;
    const torch::NoGradGuard no_grad;
    twins.both([&](TestNet& net, const at::Tensor&) { views.push_back(net.parameters()[2].t()); });
    FSDPModule::of(*Twins::as<Mlp>(*twins.sharded).layers->ptr(2)).reshard();
    EXPECT_LE(difference(views[0].sum(), views[1].sum()), kClose);
    twins.both([](TestNet& net, const at::Tensor&) { net.parameters()[2].mul_(3); });
    EXPECT_LE(difference(views[0].sum(), views[1].sum()), kClose) << "after a write";
  });
}

TEST(Training, LbfgsWithAGloballyReducedLoss) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.both([&](TestNet& net, const at::Tensor& x) {
      torch::optim::LBFGS optimizer(net.parameters(), torch::optim::LBFGSOptions(0.5).max_iter(4));
      for (int step = 0; step < 3; ++step) {
        optimizer.step([&] {
          optimizer.zero_grad();
          auto loss = net.loss(x);
          loss.backward();
          return &net == twins.plain.get() ? loss.detach()
                                           : torch::tensor(static_cast<float>(mean_over_ranks(loss, rank.group)));
        });
      }
    });
    EXPECT_SAME_PARAMETERS(twins, 2e-5);
  });
}

TEST(Training, GradientsFromBeforeWrapping) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.shard = false});
    twins.plain->loss(twins.joined).backward();
    twins.sharded->loss(twins.joined).backward();
    try {
      shard_units(*twins.sharded, rank.mesh);
    } catch (const c10::Error& error) {  // refusing is right too, when it says why
      EXPECT_NE(std::string(error.what_without_backtrace()).find("grad"), std::string::npos);
      return;
    }
    EXPECT_TRUE(DTensor::is(twins.q[0].grad()));
    EXPECT_SAME_GRADS(twins, kClose);
    twins.backward();  // accumulates
    EXPECT_SAME_GRADS(twins, kClose);
    torch::optim::SGD optimizer_p(twins.p, torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD optimizer_q(twins.q, torch::optim::SGDOptions(0.1).momentum(0.9));
    optimizer_p.step();
    optimizer_q.step();
    EXPECT_SAME_PARAMETERS(twins, kClose);
  });
}

TEST(Training, GradientAssignedByTheUserThenBackward) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    for (auto* parameters : {&twins.p, &twins.q}) {
      for (auto& parameter : *parameters) {
        parameter.mutable_grad() = torch::ones(parameter.sizes());
      }
    }
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Training, ZeroedGradientsInsteadOfDroppedOnes) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    for (int step = 0; step < 3; ++step) {
      twins.plain->zero_grad(/*set_to_none=*/false);
      twins.sharded->zero_grad(/*set_to_none=*/false);
      twins.backward();
      EXPECT_SAME_GRADS(twins, kClose);
    }
  });
}

// The loaded moments are whole on each rank. A plain tensor may hold other values on every rank, so they are not cut
// in silence: the step is refused until the program says so.
TEST(Training, OptimizerStateOfAPlainProgramIsLoaded) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    torch::optim::AdamW optimizer_p(twins.p), optimizer_q(twins.q);
    twins.backward();
    optimizer_p.step();
    optimizer_q.step();
    std::stringstream file;
    torch::serialize::OutputArchive output;
    optimizer_p.save(output);
    output.save_to(file);
    torch::optim::AdamW fresh_p(twins.p), fresh_q(twins.q);
    for (auto* optimizer : {&fresh_p, &fresh_q}) {
      torch::serialize::InputArchive input;
      file.clear();
      file.seekg(0);
      input.load_from(file);
      optimizer->load(input);
    }
    shard_optimizer_state(*twins.sharded, fresh_q);
    twins.zero_grad();
    twins.backward();
    fresh_p.step();
    shard_optimizer_state(*twins.sharded, fresh_q);
    fresh_q.step();
    EXPECT_SAME_PARAMETERS(twins, 1e-5);
  });
}

TEST(Training, OptimizerSaveOfShardedStateIsRefused) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    torch::optim::AdamW optimizer(twins.q);
    twins.sharded->loss(twins.part).backward();
    optimizer.step();
    std::stringstream file;
    EXPECT_THROW(torch::save(optimizer, file), c10::Error);
  });
}

TEST(Training, UnderAutocast) {
  run_on_ranks(1, [](const RankContext& rank) {  // autocast's cache is a process-wide one
    Twins twins(rank, square_mlp());
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    std::vector<at::Tensor> outputs;
    twins.both([&](TestNet& net, const at::Tensor& x) { outputs.push_back(net.forward(x)); });
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    EXPECT_EQ(outputs[1].scalar_type(), at::kBFloat16);
    for (auto& output : outputs) {
      output.to(at::kFloat).square().mean().backward();
    }
    EXPECT_EQ(twins.q[0].grad().scalar_type(), at::kFloat);
    EXPECT_SAME_GRADS(twins, 5e-3);
  });
}

}  // namespace
}  // namespace fsdp::testing
