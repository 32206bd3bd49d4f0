// PyTorch's scenarios about the numbers that a reduction gives: factors, dtypes, operations, buffers in flight.
#include "support/counting_backend.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

constexpr MixedPrecisionPolicy kBothBf16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16};

// The factor of the root divides its own parameters only; those of the blocks go on being divided by the ranks.
TEST(DivideFactor, OfTheRootAlone) {  // behaviours 48
  for (const int rows : {1, 2, 4}) {
    run_on_ranks(4, [rows](const RankContext& rank) {
      for (const double factor : {8.0, 4.0}) {
        Twins twins(rank, net_of<Gpt>(2), {.rows_per_rank = 1, .dtype = torch::kDouble, .shard = false});
        const auto mesh = rows == 1 ? rank.mesh : mesh_2d(rank, rows, 4 / rows, "factor" + std::to_string(factor));
        shard_units(*twins.sharded, {.mesh = mesh, .reshard_after_forward = false});
        FSDPModule::of(*twins.sharded).set_gradient_divide_factor(factor);
        const auto scale_reference = [&](TestNet& net) {
          if (&net != twins.plain.get()) return;
          for (const auto& item : net.named_parameters())
            if (!item.key().starts_with("blocks.")) item.value().mutable_grad().mul_(4 / factor);
        };
        expect_same_training(
            twins, {.tolerance = 1e-10, .optimizer = all_optimizers()[5].make, .after_backward = scale_reference});
      }
    });
  }
}

TEST(DivideFactor, OfTheNumberOfRanksChangesNothingInBf16) {  // behaviours 48
  on_two_and_three([](const RankContext& rank) {
    const MixedPrecisionPolicy policy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    std::vector<std::vector<at::Tensor>> results;
    for (const bool sets : {false, true}) {
      Twins twins(rank, net_of<Blocks>(Blocks::Kind::kPlain, 3), {.shard = false});
      shard_units(*twins.sharded, {.mesh = rank.mesh, .mp_policy = policy});
      if (sets) FSDPModule::of(*twins.sharded).set_gradient_divide_factor(rank.size());
      twins.sharded->loss(twins.part.to(at::kBFloat16)).backward();
      results.push_back(grads(twins.q));
    }
    EXPECT_LE(difference(results[0], results[1]), 0);
  });
}

struct Run {
  std::vector<double> losses;
  std::vector<at::Tensor> values;  // parameters and last gradients, this rank's part
};

Run train_in_bf16(const RankContext& rank, const DeviceMesh& mesh, bool reshard,
                  const std::function<void(Twins&)>& configure) {
  Twins twins(rank, net_of<Blocks>(), {.shard = false});
  shard_units(*twins.sharded, {.mesh = mesh, .reshard_after_forward = reshard, .mp_policy = kBothBf16});
  configure(twins);
  const auto optimizer = all_optimizers()[5].make(twins.q);
  Run run;
  for (int step = 0; step < 3; ++step) {
    twins.sharded->zero_grad();
    const auto loss = twins.sharded->loss(twins.part);
    loss.backward();
    optimizer->step();
    run.losses.push_back(loss.item<double>());
    twins.next_batch();
  }
  for (const auto& parameter : twins.q)
    for (const auto& tensor : {parameter, parameter.grad()}) run.values.push_back(DTensor(tensor).to_local().clone());
  return run;
}

TEST(MaxInputBuffers, GiveIdenticalTraining) {  // behaviours 49
  run_on_ranks(4, [](const RankContext& rank) {
    const auto grid = mesh_2d(rank, 2, 2, "buffers");
    for (const auto& mesh : {rank.mesh, grid}) {
      for (const bool reshard : {true, false}) {
        const auto expected = train_in_bf16(rank, mesh, reshard, [](Twins&) {});
        const auto expect_same = [&](const std::function<void(Twins&)>& configure) {
          const auto actual = train_in_bf16(rank, mesh, reshard, configure);
          EXPECT_EQ(expected.losses, actual.losses);
          EXPECT_LE(difference(expected.values, actual.values), 0);
        };
        for (const int64_t cap : {1, 2})
          expect_same(
              [cap](Twins& twins) { FSDPModule::of(*twins.sharded).set_reduce_scatter_max_input_buffers(cap); });
        expect_same([](Twins& twins) {
          auto block = FSDPModule::of(*Twins::as<Blocks>(*twins.sharded).blocks[1]);
          block.set_reduce_scatter_max_input_buffers(3, /*recurse=*/false);
        });
      }
    }
  });
}

TEST(ForceSum, ReductionsAreSumsOnEveryMesh) {  // behaviours 63, 65
  register_counting_backend();
  for (const auto& [rows, columns] : {std::pair(1, 1), std::pair(2, 2), std::pair(1, 4), std::pair(4, 1)}) {
    run_on_ranks(rows * columns, [rows = rows, columns = columns](const RankContext& rank) {
      const auto mesh = mesh_2d(rank, rows, columns, "sums", {"replicate", "shard"}, "counting");
      for (const bool force : {false, true}) {
        Twins twins(rank, net_of<Mlp>(), {.shard = false});
        shard_units(*twins.sharded, {.mesh = mesh});
        if (force) FSDPModule::of(*twins.sharded).set_force_sum_reduction_for_comms(true);
        twins.backward();
        EXPECT_SAME_GRADS(twins, kClose);
      }
      using Op = c10d::ReduceOp::RedOpType;
      for (const auto& [dim, size] : {std::pair("shard", columns), std::pair("replicate", rows)}) {
        const auto ops = counts_of(mesh.get_group(dim)).reduce_ops();
        const std::set<Op> sums = rows * columns == 1 ? std::set<Op>{} : std::set<Op>{Op::SUM};
        if (size > 1 || rows * columns == 1) {
          EXPECT_EQ(ops, sums) << dim;
        }
        EXPECT_FALSE(ops.contains(Op::AVG)) << dim;
      }
    });
  }
}

// Rows of all parameters are packed beside each other; what is packed is cast to the dtype of the reduction.
TEST(Packing, OfMixedDtypesAndStridesIsExact) {  // behaviours 68
  for (const auto low : {at::kBFloat16, at::kHalf}) {
    run_on_ranks(4, [low](const RankContext& rank) {
      torch::nn::Module net;
      const auto a = net.register_parameter("a", torch::ones({5, 3}, low));
      const auto b = net.register_parameter("b", torch::ones({7}));
      const auto c = net.register_parameter("c", torch::ones({2049, 2, 2}, low));
      fully_shard(net, {.mesh = rank.mesh, .mp_policy = {.reduce_dtype = at::kFloat}});
      // Small whole numbers: exact in every dtype.
      const auto gradient = [](const at::Tensor& like) {
        return torch::arange(like.numel()).remainder(16).view(like.sizes()).to(like.scalar_type());
      };
      const auto strided = gradient(c).permute({2, 1, 0}).contiguous() * (rank.rank() + 1);
      ((a * gradient(a) * (rank.rank() + 1)).sum().to(at::kFloat) + (b * gradient(b) * (rank.rank() + 1)).sum() +
       (c.permute({2, 1, 0}) * strided).sum().to(at::kFloat))
          .backward();
      for (const auto& parameter : {a, b, c}) {
        EXPECT_EQ(parameter.grad().scalar_type(), parameter.scalar_type());
        EXPECT_LE(difference(gradient(parameter) * 2.5, parameter.grad()), 0) << "the mean of 1 to 4 times";
      }
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
