// Every way the autograd engine can be driven gives the gradients of one process.
#include <torch/csrc/autograd/functions/utils.h>

#include <thread>

#include "support/parity.h"

namespace fsdp::testing {
namespace {

using torch::autograd::Variable;

at::Tensor squared_output(TestNet& net, const at::Tensor& x) { return net.forward(x).square().mean(); }

TEST(Autograd, OneStepGivesTheGradientsOfOneProcess) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>());
      twins.backward();
      EXPECT_TRUE(DTensor::is(twins.q[0].grad()));
      EXPECT_EQ(twins.q[0].grad().sizes(), twins.p[0].sizes());
      EXPECT_SAME_GRADS(twins, kClose);
    });
  }
}

TEST(Autograd, RetainedGraphRunsBackwardTwice) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.both([](TestNet& net, const at::Tensor& x) {
      auto loss = net.loss(x);
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
    });
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Autograd, TwoForwardsBeforeOneBackward) {
  on_two_and_three([](const RankContext& rank) {
    for (std::optional<bool> reshard : {std::optional<bool>(), std::optional(true), std::optional(false)}) {
      Twins twins(rank, square_mlp(), {.reshard_after_forward = reshard});
      twins.both([](TestNet& net, const at::Tensor& x) { (net.loss(x) + net.loss(x * 2)).backward(); });
      EXPECT_SAME_GRADS(twins, kClose);
    }
  });
}

TEST(Autograd, TwoForwardsThenTwoBackwardsInEitherOrder) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    for (bool reversed : {false, true}) {
      twins.both([&](TestNet& net, const at::Tensor& x) {
        auto first = squared_output(net, x);
        auto second = net.forward(x * 2).sin().mean();
        (reversed ? second : first).backward();
        (reversed ? first : second).backward();
      });
      EXPECT_SAME_GRADS(twins, kClose) << "reversed " << reversed;
      twins.zero_grad();
    }
  });
}

TEST(Autograd, ModelAppliedTwiceInOneGraph) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(8, 16, 16, 8));
    for (int step = 0; step < 2; ++step) {
      twins.both([](TestNet& net, const at::Tensor& x) { net.forward(net.forward(x)).square().mean().backward(); });
      EXPECT_SAME_GRADS(twins, kClose);
      twins.zero_grad();
    }
  });
}

TEST(Autograd, ForwardWithoutBackwardLeavesNothingBehind) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.sharded->forward(twins.part * 3);
    auto kept = twins.sharded->forward(twins.part);
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Autograd, AccumulatesOverBackwards) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    for (int i = 0; i < 3; ++i) {
      twins.backward();
      twins.next_batch();
    }
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Autograd, GradReturnsShardedGradients) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    std::vector<std::vector<at::Tensor>> results;
    twins.both([&](TestNet& net, const at::Tensor& x) {
      results.push_back(torch::autograd::grad({net.loss(x)}, net.parameters()));
    });
    EXPECT_TRUE(DTensor::is(results[1][0]));
    EXPECT_LE(difference(results[0], results[1]), kClose);
    EXPECT_FALSE(twins.q[0].grad().defined());
  });
}

TEST(Autograd, GradAllowsUnused) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const auto other = torch::ones({3}, torch::requires_grad());
    const auto loss = twins.sharded->forward(twins.part).sum();
    const auto result = torch::autograd::grad({loss}, {twins.q[0], other}, {}, {}, false, /*allow_unused=*/true);
    EXPECT_TRUE(result[0].defined());
    EXPECT_FALSE(result[1].defined());
    // The bias travels with the weight in one group, yet stays undefined as it would in a plain module.
    const auto one = (twins.q[2] * 2).sum();
    const auto unused = torch::autograd::grad({one}, {twins.q[2], twins.q[3]}, {}, {}, false, /*allow_unused=*/true);
    EXPECT_LE(difference(torch::full({16, 16}, 2.0), unused[0]), kClose);
    EXPECT_FALSE(unused[1].defined());
  });
}

TEST(Autograd, BackwardToChosenInputs) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.both([](TestNet& net, const at::Tensor& x) {
      const auto parameters = net.parameters();
      net.loss(x).backward({}, {}, false, std::vector<at::Tensor>{parameters[0], parameters[3]});
    });
    EXPECT_TRUE(twins.q[3].grad().defined());
    EXPECT_FALSE(twins.q[1].grad().defined());
    EXPECT_SAME_GRADS(twins, kClose);
    twins.zero_grad();
    twins.both([](TestNet& net, const at::Tensor& x) {
      const auto parameters = net.parameters();
      torch::autograd::backward({net.loss(x)}, {}, {}, false, {parameters[0], parameters[3]});
    });
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Autograd, GradientPenaltyOnTheInput) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.both([](TestNet& net, const at::Tensor& x) {
      const auto input = x.detach().clone().requires_grad_();
      const auto gradient = torch::autograd::grad({net.forward(input).sum()}, {input}, {}, true, true)[0];
      (gradient.norm(2, 1) - 1).square().mean().backward();
    });
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Autograd, ParameterUsedOutsideForward) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    expect_same_training(twins, {.num_steps = 4, .backward = [](TestNet& net, const at::Tensor& x) {
                                   auto penalty = torch::zeros({});
                                   for (const auto& parameter : net.parameters()) {
                                     penalty = penalty + parameter.square().sum();
                                   }
                                   (net.loss(x) + 0.01 * penalty).backward();
                                 }});
  });
}

TEST(Autograd, LossIsAViewOfAParameter) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.both([](TestNet& net, const at::Tensor& x) { (net.loss(x) + net.parameters()[2].view({-1})[3]).backward(); });
    EXPECT_SAME_GRADS(twins, kClose);
    twins.zero_grad();
    twins.both([](TestNet& net, const at::Tensor&) { net.parameters()[2].view({-1})[3].backward(); });
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Autograd, OutputViewChangedInPlaceHasTheSameGradients) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    twins.both([](TestNet& net, const at::Tensor& x) {
      auto output = net.forward(x);  // [B, 3]
      auto column = output.select(1, 1);
      column.mul_(2).add_(1);
      output.square().mean().backward();
    });
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Autograd, TwoGroupsInOneOp) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.both([](TestNet& net, const at::Tensor&) {
      const auto w = net.parameters();
      torch::cat({w[0].flatten(), w[2].flatten(), w[4].flatten()}).square().sum().backward();
    });
    EXPECT_SAME_GRADS(twins, kClose);
    twins.zero_grad();
    twins.both([](TestNet& net, const at::Tensor& x) {
      const auto w = net.parameters();
      at::linear(at::linear(x, w[0]), w[2], w[1]).square().mean().backward();
    });
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Autograd, NoGradUseThenGradUseInOneForward) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.both([](TestNet& net, const at::Tensor& x) {
      const auto w = net.parameters();
      at::Tensor constant;
      {
        const torch::NoGradGuard no_grad;
        constant = w[2].t();
      }
      const auto h = at::linear(x, w[0]);
      (h.mm(constant) + at::linear(h, w[2], w[3])).square().mean().backward();
    });
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Autograd, UnfrozenInTheMiddleOfAForward) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.p[3].set_requires_grad(false);
    twins.q[3].set_requires_grad(false);
    twins.both([](TestNet& net, const at::Tensor& x) {
      auto w = net.parameters();
      const auto h = at::linear(at::linear(x, w[0]), w[2]);
      w[3].set_requires_grad(true);
      (h + w[3]).square().mean().backward();
    });
    EXPECT_TRUE(twins.q[3].grad().defined());
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Autograd, TensorHooks) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    for (auto* w : {&twins.p, &twins.q}) {
      (*w)[0].register_hook([](at::Tensor g) { return g * 2; });
      (*w)[2].register_hook([](at::Tensor g) { g.clamp_(-0.01, 0.01); });
      (*w)[4].register_hook([](at::Tensor g) { return g / (g.norm() + 1e-3); });
    }
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose);
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose) << "accumulated";
  });
}

// y = x * b, b [n]; its backward answers with the whole gradient of b.
struct ScaleByParameter : torch::autograd::Function<ScaleByParameter> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& b) {
    context->save_for_backward({x, b});
    return x * b;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    return {grads[0] * saved[1], (grads[0] * saved[0]).sum(0)};
  }
};

TEST(Autograd, CustomFunctionOfTheParameterItself) {
  for (const int size : {1, 2, 3}) {
    run_on_ranks(size, [](const RankContext& rank) {
      for (const bool used_twice : {false, true}) {
        Twins twins(rank, net_of<Mlp>());
        twins.both([&](TestNet& net, const at::Tensor& x) {
          auto& first = *Twins::as<Mlp>(net).layers->ptr(0)->as<torch::nn::LinearImpl>();
          const auto h = torch::linear(x, first.weight, used_twice ? first.bias : at::Tensor());
          ScaleByParameter::apply(h.exp(), first.bias).mean().backward();
        });
        EXPECT_TRUE(DTensor::is(twins.q[1].grad()));
        EXPECT_SAME_GRADS(twins, kClose);
      }
    });
  }
}

// Takes a gradient-descent step as soon as a gradient is ready, and drops the gradient.
struct StepWhenReady : torch::autograd::PostAccumulateGradHook {
  void operator()(const Variable& parameter) override {
    const torch::NoGradGuard no_grad;
    parameter.add_(parameter.grad(), -0.1);
    parameter.mutable_grad().reset();
  }
};

TEST(Autograd, OptimizerInsideAPostAccumulateHook) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    for (auto* parameters : {&twins.p, &twins.q}) {
      for (auto& parameter : *parameters) {
        torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<StepWhenReady>());
      }
    }
    for (int step = 0; step < 3; ++step) {
      twins.backward();
      EXPECT_FALSE(twins.q[0].grad().defined());
      EXPECT_SAME_PARAMETERS(twins, kClose);
    }
  });
}

TEST(Autograd, TrainsOnAfterAnExceptionInBackward) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const auto throwing = [](TestNet& net, const at::Tensor& x, int64_t layer) {
      auto& layers = *dynamic_cast<Mlp&>(net).layers;
      auto h = x;
      for (int64_t i = 0; i < static_cast<int64_t>(layers.size()); ++i) {
        h = (layers.begin() + i)->forward(h);
        if (i == layer) {
          h.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("boom"); });
        }
      }
      h.square().mean().backward();
    };
    const auto gathers_of_a_step = [&] {
      twins.zero_grad();
      const auto before = twins.stats().num_all_gathers;
      twins.backward();
      const auto after = twins.stats().num_all_gathers;
      EXPECT_SAME_GRADS(twins, kClose);
      return after - before;
    };
    gathers_of_a_step();
    const auto usual = gathers_of_a_step();
    for (int64_t layer : {4, 2}) {
      EXPECT_THROW(throwing(*twins.sharded, twins.part, layer), std::exception);
      gathers_of_a_step();
      EXPECT_EQ(gathers_of_a_step(), usual);
    }
  });
}

TEST(Autograd, ChangedBetweenForwardAndBackwardIsAnErrorAsForPlainTensors) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.both([](TestNet& net, const at::Tensor& x) {
      auto loss = net.loss(x);
      {
        const torch::NoGradGuard no_grad;
        net.parameters()[2].mul_(2);
      }
      try {
        loss.backward();
        ADD_FAILURE() << "no error";
      } catch (const c10::Error& error) {
        EXPECT_NE(std::string(error.what()).find("modified by an inplace operation"), std::string::npos)
            << error.what_without_backtrace();
      }
    });
  });
}

TEST(Autograd, InPlaceWriteToALeafIsAnErrorAsForPlainTensors) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const auto before = whole(twins.q[0]);
    EXPECT_THROW(twins.q[0].mul_(2), c10::Error);
    EXPECT_THROW(twins.q[0].view({-1}).mul_(2), c10::Error);
    EXPECT_THROW(twins.q[0].t().mul_(2), c10::Error);
    EXPECT_THROW(twins.q[0].copy_(torch::zeros({16, 8})), c10::Error);
    EXPECT_LE(difference(before, twins.q[0]), 0);
  });
}

TEST(Autograd, BackwardInAnotherThreadThanForward) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    for (int step = 0; step < 2; ++step) {
      twins.zero_grad();
      twins.both([](TestNet& net, const at::Tensor& x) {
        auto loss = net.loss(x);
        std::thread([loss] { loss.backward(); }).join();
      });
      EXPECT_SAME_GRADS(twins, kClose);
    }
  });
}

// Keeps nothing of the forward and runs it again in backward, with a backward of its own inside.
struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, TanhLinear* module, at::Tensor x,
                            const at::Tensor& /*trigger*/) {
    context->save_for_backward({x});
    context->saved_data["module"] = reinterpret_cast<int64_t>(module);
    const torch::NoGradGuard no_grad;
    return module->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    at::Tensor y;
    {
      const torch::AutoGradMode grad_mode(true);
      // NOLINTNEXTLINE(performance-no-int-to-ptr): a context keeps IValues only
      y = reinterpret_cast<TanhLinear*>(context->saved_data["module"].toInt())->forward(x);
    }
    torch::autograd::backward({y}, {gradients[0]});
    return {{}, x.grad(), {}};
  }
};

TEST(Autograd, RecomputationWithABackwardInsideBackward) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Blocks>(Blocks::Kind::kNestedInner, 3));
    const auto trigger = torch::zeros({1}, torch::requires_grad());
    for (int step = 0; step < 3; ++step) {
      twins.both([&](TestNet& net, const at::Tensor& x) {
        auto& blocks = dynamic_cast<Blocks&>(net);
        auto h = blocks.in(x);
        for (auto& block : blocks.blocks) {
          h = block->second(Recompute::apply(block->inner.get(), block->first(h), trigger));
        }
        blocks.out(h).square().mean().backward();
      });
      EXPECT_SAME_GRADS(twins, kClose);
      twins.zero_grad();
    }
  });
}

TEST(Autograd, SparseGradientIsDensifiedOrNamesItsParameter) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true));
    fill_parameters(*embedding, 1);
    fully_shard(*embedding, {.mesh = rank.mesh});
    const auto loss = embedding(torch::tensor({1, 2})).sum();
    try {
      loss.backward();
      auto expected = torch::zeros({10, 4});
      expected.slice(0, 1, 3).fill_(1);
      EXPECT_LE(difference(expected, embedding->weight.grad()), kClose);
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what_without_backtrace()).find("weight"), std::string::npos);
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
