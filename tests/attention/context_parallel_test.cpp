// The scope: what it does to buffers and to attention, and what it refuses.
#include <fsdp/context_parallel.h>

#include <cmath>
#include <thread>

#include "attention/sequence_net.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

std::vector<int64_t> values_of(const at::Tensor& tensor) {
  const auto flat = tensor.contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}
using Values = std::vector<int64_t>;

torch::nn::Linear a_wrapped_module(const DeviceMesh& mesh) {
  torch::nn::Linear module(4, 4);
  fill_parameters(*module, 1);
  fully_shard(module, {.mesh = mesh});
  return module;
}

const ContextParallelOptions kRing{.method = ContextParallelMethod::kRing};

TEST(ContextParallel, BuffersHoldTheOwnPartAndAreRestored) {  // behaviours 160
  run_on_ranks(2, [](const RankContext& rank) {
    auto module = a_wrapped_module(rank.mesh);
    auto tokens = torch::arange(16).view({2, 8});
    auto table = torch::arange(24.0).view({8, 3});
    auto kept = torch::arange(8);
    const auto* const storage = tokens.const_data_ptr();
    auto options = kRing;
    options.no_restore_buffers = {kept};
    {
      const auto scope = context_parallel(module, rank.mesh, {tokens, table, kept}, {1, 0, -1}, options);
      const auto expected = rank.rank() == 0 ? Values{0, 1, 6, 7} : Values{2, 3, 4, 5};
      EXPECT_EQ(values_of(tokens[0]), expected);
      EXPECT_EQ(values_of(table.select(1, 0).to(torch::kLong).floor_divide(3)), expected);
      EXPECT_EQ(values_of(kept), expected);
      EXPECT_EQ(values_of(scope.position_ids()), expected);
      EXPECT_EQ(scope.sequence_length(), 8);
      EXPECT_TRUE(scope.unshard(tokens, 1).equal(torch::arange(16).view({2, 8})));
      const auto y = torch::ones({1, 1, 4, 2});
      (void)at::scaled_dot_product_attention(y, y, y, {}, 0.0, true);
    }
    EXPECT_TRUE(tokens.equal(torch::arange(16).view({2, 8})));
    EXPECT_EQ(tokens.const_data_ptr(), storage);
    EXPECT_EQ(table.size(0), 8);
    EXPECT_EQ(kept.size(0), 4) << "stays split";
  });
}

TEST(ContextParallel, EndsAlsoByAnException) {  // behaviours 160, 166
  run_on_ranks(2, [](const RankContext& rank) {
    auto module = a_wrapped_module(rank.mesh);
    auto tokens = torch::arange(8);
    const auto x = torch::randn({1, 2, 4, 4});
    const auto plain = at::scaled_dot_product_attention(x, x, x);
    EXPECT_EQ(error_of<c10::ValueError>([&] {
                const auto scope = context_parallel(module, rank.mesh, {tokens}, {0});
                TORCH_CHECK_VALUE(false, "the user's own");
              }).find("the user's own"),
              0);
    EXPECT_EQ(tokens.size(0), 8);
    EXPECT_TRUE(at::scaled_dot_product_attention(x, x, x).equal(plain)) << "attention is plain again";
  });
}

TEST(ContextParallel, OtherThreadsAttendPlainly) {
  run_on_ranks(2, [](const RankContext& rank) {
    auto module = a_wrapped_module(rank.mesh);
    const auto x = torch::randn({1, 2, 4, 4});
    const auto plain = at::scaled_dot_product_attention(x, x, x);
    const auto scope = context_parallel(module, rank.mesh, {}, {});
    at::Tensor elsewhere;
    std::thread([&] { elsewhere = at::scaled_dot_product_attention(x, x, x); }).join();
    EXPECT_TRUE(elsewhere.equal(plain));
    (void)at::scaled_dot_product_attention(x, x, x);
  });
}

TEST(ContextParallel, RefusesBuffersThatDoNotFit) {
  run_on_ranks(2, [](const RankContext& rank) {
    auto module = a_wrapped_module(rank.mesh);
    const auto refusal = [&](const std::vector<at::Tensor>& buffers, const std::vector<int64_t>& dims,
                             const ContextParallelOptions& options = {}) {
      return error_of<c10::Error>(
          [&] { const auto scope = context_parallel(module, rank.mesh, buffers, dims, options); });
    };
    const auto eight = torch::arange(8);
    EXPECT_CONTAINS(refusal({eight, torch::arange(6)}, {0, 0}), "buffer 1 of shape [6] has 6 tokens");
    EXPECT_CONTAINS(refusal({eight}, {0, 0}), "1 buffers but 2 seq_dims");
    EXPECT_CONTAINS(refusal({eight}, {1}), "buffer 0: seq_dim 1 of a tensor of 1 dims");
    EXPECT_CONTAINS(refusal({eight, eight}, {0, 0}), "one tensor");
    EXPECT_CONTAINS(refusal({torch::ones({8}, torch::requires_grad())}, {0}), "requires grad");
    EXPECT_CONTAINS(refusal({module->weight}, {0}), "DTensor");
    EXPECT_CONTAINS(refusal({at::Tensor()}, {0}), "undefined");
    EXPECT_CONTAINS(refusal({torch::arange(1)}, {0}), "shorter than the 2 ranks");
    EXPECT_CONTAINS(refusal({eight}, {0}, {.no_restore_buffers = {torch::arange(8)}}), "none of the buffers");
    EXPECT_CONTAINS(refusal({eight}, {0}, {.sequence_length = 16}), "sequence_length says 16");
    EXPECT_CONTAINS(error_of([&] { (void)context_parallel(module, {}, {}, {}); }), "1-D mesh");
    EXPECT_EQ(eight.size(0), 8) << "nothing was cut";
  });
}

TEST(ContextParallel, RefusesDifferentSequencesOnTheRanks) {
  run_on_ranks(3, [](const RankContext& rank) {
    auto module = a_wrapped_module(rank.mesh);
    const auto tokens = torch::arange(8) + (rank.rank() == 2 ? 1 : 0);
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { (void)context_parallel(module, rank.mesh, {tokens}, {0}); }),
                    "must hold the same inputs");
    EXPECT_EQ(tokens.size(0), 8);
  });
}

// One rank goes on with a length that all know, another changes to one that all know too.
TEST(ContextParallel, RanksThatChangeToDifferentLengths) {
  run_on_ranks(
      2,
      [](const RankContext& rank) {
        auto module = a_wrapped_module(rank.mesh);
        const auto attend = [&](int64_t length) {
          const auto scope = context_parallel(module, rank.mesh, {}, {}, {.sequence_length = length});
          const auto x = torch::ones({1, 2, length / 2, 4});
          (void)at::scaled_dot_product_attention(x, x, x, {}, 0.0, true);
        };
        attend(16);
        attend(8);
        EXPECT_NE(error_of<c10::DistError>([&] { attend(rank.rank() == 0 ? 8 : 16); }), "");
      },
      std::chrono::seconds(4));
}

TEST(ContextParallel, RefusesModulesThatWouldTrainApart) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto refusal = [&](torch::nn::Module& module, const ContextParallelOptions& options = {}) {
      return error_of<c10::ValueError>(
          [&] { const auto scope = context_parallel(module, rank.mesh, {}, {}, options); });
    };
    Encoder encoder;
    EXPECT_CONTAINS(refusal(encoder), "'encoder.layers.0.self_attn' is a torch::nn::MultiheadAttention");
    torch::nn::Sequential plain(torch::nn::Linear(2, 2));
    EXPECT_CONTAINS(refusal(*plain), "parameter '0.weight' is not sharded");
    EXPECT_CONTAINS(refusal(*plain), "a DistributedDataParallel over them");
    EXPECT_EQ(refusal(*plain, {.gradients_reduced_elsewhere = true}), "");
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(refusal(*plain), "") << "without gradients there is nothing to average";
  });
}

TEST(ContextParallel, RefusesParametersShardedOverOtherRanks) {
  run_on_ranks(4, [](const RankContext& rank) {
    const auto mesh = mesh_2d(rank, 2, 2, "grid", {"dp", "cp"});
    auto net = make_sequence_net();
    fully_shard(net, {.mesh = mesh["dp"]});
    auto tokens = torch::zeros({1, 8}, torch::kLong);
    const auto scope = context_parallel(net, mesh["cp"], {tokens}, {1});
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { (void)net->forward(tokens, scope.position_ids()); }),
                    "its gradient is averaged over others");
    {
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(net->forward(tokens, scope.position_ids()).defined()) << "evaluation needs no gradients";
    }
  });
}

// Also where the group was in use before the scope began.
TEST(ContextParallel, RefusesParametersOfAGroupThatIsInUseAlready) {
  run_on_ranks(4, [](const RankContext& rank) {
    const auto mesh = mesh_2d(rank, 2, 2, "grid", {"dp", "cp"});
    auto net = make_sequence_net();
    fully_shard(net, {.mesh = mesh["dp"]});
    const auto decay = net->head->weight.square().sum();
    auto tokens = torch::zeros({1, 8}, torch::kLong);
    const auto scope = context_parallel(net, mesh["cp"], {tokens}, {1});
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { (void)net->forward(tokens, scope.position_ids()); }),
                    "its gradient is averaged over others");
  });
}

TEST(ContextParallel, RefusesAttentionThatCannotBeSplit) {  // behaviours 159
  run_on_ranks(2, [](const RankContext& rank) {
    auto module = a_wrapped_module(rank.mesh);
    auto tokens = torch::arange(8);
    const auto x = torch::randn({1, 2, 4, 4});
    const auto wrong = torch::randn({1, 2, 8, 4});
    {
      const auto scope = context_parallel(module, rank.mesh, {tokens}, {0});
      const auto refusal = [](const auto& q, const at::Tensor& mask) {
        return error_of([&] { (void)at::scaled_dot_product_attention(q, q, q, mask, 0.0, !mask.defined()); });
      };
      EXPECT_CONTAINS(refusal(x, torch::ones({4, 4})), "attn_mask");
      EXPECT_CONTAINS(refusal(wrong, {}), "has 8 tokens, but this rank holds 4 of the sequence of 8");
      EXPECT_CONTAINS(error_of<c10::ValueError>([&] { (void)at::scaled_dot_product_attention(x, x[0][0], x); }),
                      "of as many dims, got [1, 2, 4, 4], [4, 4] and [1, 2, 4, 4]");
      EXPECT_EQ(refusal(x, {}), "");
      const auto nested = error_of([&] { (void)context_parallel(module, rank.mesh, {}, {}); });
      EXPECT_CONTAINS(nested, "context_parallel inside context_parallel");
      EXPECT_CONTAINS(nested, "end the earlier scope first");
    }
    const auto ring = context_parallel(module, rank.mesh, {tokens}, {0}, kRing);
    EXPECT_CONTAINS(error_of([&] { (void)at::scaled_dot_product_attention(x, x, x, {}, 0.5, true); }), "dropout");
    EXPECT_CONTAINS(error_of([&] { (void)at::scaled_dot_product_attention(x, x, x); }), "kContiguous")
        << "balance without causality";
  });
}

struct CountedWarnings : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override { ++num_warnings; }
  int num_warnings = 0;
};

// So that a program can set the degree to 1 and keep its scope.
TEST(ContextParallel, OfOneRankTakesNothingOver) {
  run_on_ranks(1, [](const RankContext& rank) {
    CountedWarnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    auto tokens = torch::arange(8);
    const auto x = torch::randn({1, 2, 8, 4});
    const auto mask = torch::ones({8, 8}, torch::kBool).tril();
    const auto plain = at::scaled_dot_product_attention(x, x, x, mask);
    {
      Encoder encoder;  // has a torch::nn::MultiheadAttention
      const auto scope = context_parallel(encoder, rank.mesh, {tokens}, {0}, kRing);
      EXPECT_EQ(values_of(tokens), (Values{0, 1, 2, 3, 4, 5, 6, 7}));
      EXPECT_EQ(values_of(scope.position_ids()), values_of(tokens));
      EXPECT_TRUE(scope.unshard(tokens, 0).equal(tokens));
      EXPECT_TRUE(at::scaled_dot_product_attention(x, x, x, mask).equal(plain));
      EXPECT_TRUE(at::scaled_dot_product_attention(x, x, x, {}, 0.5).defined()) << "dropout, not causal";
    }
    { const auto scope = context_parallel(torch::nn::Linear(2, 2), rank.mesh, {tokens}, {0}, kRing); }
    EXPECT_EQ(warnings.num_warnings, 0);
  });
}

TEST(ContextParallel, BackwardAfterTheScopeIsAnError) {
  run_on_ranks(2, [](const RankContext& rank) {
    auto net = make_sequence_net();
    fully_shard(net, {.mesh = rank.mesh});
    auto tokens = torch::zeros({1, 8}, torch::kLong);
    at::Tensor loss;
    {
      const auto scope = context_parallel(net, rank.mesh, {tokens}, {1});
      loss = net->forward(tokens, scope.position_ids()).sum();
    }
    EXPECT_CONTAINS(error_of([&] { loss.backward(); }), "modified by an inplace operation");
  });
}

TEST(ContextParallel, PositionsFollowTheSplit) {  // behaviours 169
  run_on_ranks(2, [](const RankContext& rank) {
    auto module = a_wrapped_module(rank.mesh);
    const auto scope =
        context_parallel(module, rank.mesh, {}, {}, {.split = SequenceSplit::kHeadTail, .sequence_length = 8});
    if (rank.rank() != 0) return;
    const auto angle = static_cast<double>(scope.position_ids()[2].item<int64_t>());
    EXPECT_NEAR(std::cos(angle), 0.960170, 1e-6) << "position 6, not 2";
    EXPECT_NEAR(std::sin(angle), -0.279416, 1e-6);
    const auto ids = torch::arange(48).view({3, 2, 8});
    EXPECT_EQ(values_of(context_parallel_shard(ids, rank.mesh, 2, SequenceSplit::kHeadTail)[2][1]),
              (Values{40, 41, 46, 47}));
  });
}

TEST(ContextParallel, UnshardIsTheInverseOfShard) {
  for (const int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      for (const auto split : {SequenceSplit::kContiguous, SequenceSplit::kHeadTail}) {
        for (const int64_t length : {8, 11}) {
          const auto tokens = torch::arange(2 * length * 3).view({2, length, 3});
          const auto part = context_parallel_shard(tokens, rank.mesh, 1, split);
          EXPECT_TRUE(context_parallel_unshard(part, rank.mesh, 1, split, length).equal(tokens)) << length;
        }
      }
      const auto wrong = torch::zeros({rank.rank() == 0 ? 5 : 4});
      if (rank.size() == 1) return;
      EXPECT_CONTAINS(error_of<c10::ValueError>([&] {
                        (void)context_parallel_unshard(wrong, rank.mesh, 0, SequenceSplit::kContiguous,
                                                       4 * rank.size());
                      }),
                      "a part of shape [5] with 5 tokens, not the 4 of its rank");
    });
  }
}

TEST(NextTokenLabels, AreMadeBeforeTheSplit) {
  const auto tokens = torch::arange(6).view({2, 3});
  EXPECT_EQ(values_of(next_token_labels(tokens)), (Values{1, 2, -100, 4, 5, -100}));
  EXPECT_EQ(values_of(next_token_labels(tokens, 0, -1)), (Values{3, 4, 5, -1, -1, -1}));
  EXPECT_CONTAINS(error_of<c10::IndexError>([&] { (void)next_token_labels(tokens, 2); }), "seq_dim 2");
}

}  // namespace
}  // namespace fsdp::testing
