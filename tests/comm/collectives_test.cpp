// Values and errors of the collectives that the layers above use.
#include "comm/collectives.h"

#include <gtest/gtest.h>

#include "support/errors.h"
#include "support/run_ranks.h"

namespace fsdp {
namespace {

using testing::run_ranks;
using RedOpType = c10d::ReduceOp::RedOpType;

TEST(Collectives, MoveTheRightValues) {
  for (const int size : {1, 2, 3, 4}) {
    run_ranks(size, [&](const ProcessGroup& group, int rank) {
      const auto own = torch::full({3}, rank, torch::kFloat);
      auto all = torch::empty({size, 3});
      comm::all_gather(all, own, group, "x").wait();
      EXPECT_TRUE(torch::equal(all.select(1, 2), torch::arange(size, torch::kFloat)));

      auto copy = own.clone();
      comm::broadcast(copy, size - 1, group, "x").wait();
      EXPECT_TRUE(torch::equal(copy, torch::full({3}, size - 1, torch::kFloat)));

      auto gathered = rank == 0 ? torch::empty({size, 3}) : torch::Tensor();
      comm::gather_to_rank0(gathered, own, group, "x").wait();
      if (rank == 0) {
        EXPECT_TRUE(torch::equal(gathered, all));
      }

      auto scattered = torch::empty({3});
      const auto rows = rank == 0 ? all.unbind(0) : std::vector<torch::Tensor>();
      comm::scatter_from_rank0(scattered, rows, group, "x").wait();
      EXPECT_TRUE(torch::equal(scattered, own));

      auto a = torch::full({2}, rank + 1, torch::kDouble);
      auto b = torch::full({1}, rank, torch::kInt64);
      for (auto& pending : comm::all_reduce({a, b}, group, "x")) pending.wait();
      EXPECT_EQ(a[1].item<double>(), size * (size + 1) / 2);
      EXPECT_EQ(b[0].item<int64_t>(), size * (size - 1) / 2);
    });
  }
}

// What computes nothing takes every dtype, whether the backend knows it or not.
TEST(Collectives, MoveEveryDtype) {
  run_ranks(2, [&](const ProcessGroup& group, int rank) {
    for (const auto dtype : {at::kShort, at::kBool, at::kComplexFloat, at::kFloat8_e4m3fn, at::kBFloat16}) {
      const auto whole = torch::arange(4).view({2, 2}).to(dtype);
      const auto own = whole.select(0, rank);
      const auto same = [&](const torch::Tensor& a, const torch::Tensor& b) {
        return a.scalar_type() == dtype && torch::equal(a.view(at::kByte), b.view(at::kByte));
      };
      auto all = torch::zeros_like(whole);
      comm::all_gather(all, own, group, "x").wait();
      EXPECT_TRUE(same(all, whole)) << dtype;
      auto copy = own.clone();
      comm::broadcast(copy, 1, group, "x").wait();
      EXPECT_TRUE(same(copy, whole.select(0, 1))) << dtype;
      auto gathered = torch::zeros_like(whole);
      comm::gather_to_rank0(gathered, own, group, "x").wait();
      EXPECT_EQ(same(gathered, whole), rank == 0) << dtype;
      auto scattered = torch::zeros_like(own);
      comm::scatter_from_rank0(scattered, whole.unbind(0), group, "x").wait();
      EXPECT_TRUE(same(scattered, own)) << dtype;
    }
  });
}

// Rank r sends rank d r + d elements, so that some counts are zero and none are equal; every dtype travels as bytes.
TEST(Collectives, AllToAllTakesUnevenCounts) {
  for (const int size : {1, 2, 3, 4}) {
    run_ranks(size, [&](const ProcessGroup& group, int rank) {
      for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble, at::kBool}) {
        std::vector<int64_t> counts;
        std::vector<torch::Tensor> sent, expected;
        for (int64_t other = 0; other < size; ++other) {
          counts.push_back(rank + other);
          sent.push_back(torch::full({rank + other}, rank * 10 + other, dtype));
          expected.push_back(torch::full({rank + other}, other * 10 + rank, dtype));
        }
        const auto whole = torch::cat(expected);
        auto output = torch::empty_like(whole);
        comm::all_to_all(output, counts, torch::cat(sent), counts, group, "x").wait();
        EXPECT_TRUE(torch::equal(output, whole)) << dtype << ": " << output;
      }
    });
  }
}

// The averaging reduce-scatter of some backends returned the sum: each op must be right or refuse.
TEST(Collectives, ReduceScatterReducesAsAsked) {  // R01 (c)
  for (const int size : {2, 3}) {
    run_ranks(size, [&](const ProcessGroup& group, int rank) {
      const auto n = static_cast<float>(size);
      const auto input = torch::full({int64_t{size} * 2}, rank + 1, torch::kFloat);
      const std::map<RedOpType, float> expected{
          {RedOpType::SUM, n * (n + 1) / 2}, {RedOpType::AVG, (n + 1) / 2}, {RedOpType::MAX, n}, {RedOpType::MIN, 1}};
      for (const auto& [op, value] : expected) {
        auto output = torch::empty({2});
        comm::reduce_scatter(output, input, group, "x", op).wait();
        EXPECT_TRUE(torch::equal(output, torch::full({2}, value))) << "op " << int(op) << ": " << output;
        // The list form of LibTorch, which this library does not use.
        std::vector<at::Tensor> outputs{torch::empty({2})};
        std::vector<std::vector<at::Tensor>> inputs{input.chunk(size)};
        c10d::ReduceScatterOptions options;
        options.reduceOp = op;
        group->reduce_scatter(outputs, inputs, options)->wait();
        EXPECT_TRUE(torch::equal(outputs[0], torch::full({2}, value))) << "list, op " << int(op) << ": " << outputs[0];
      }
    });
  }
}

TEST(Collectives, EachRankGetsItsPartOfTheReduction) {
  run_ranks(3, [](const ProcessGroup& group, int rank) {
    const auto input = torch::arange(6, torch::kFloat) * (rank + 1);
    auto output = torch::empty({2});
    comm::reduce_scatter(output, input, group, "x").wait();
    EXPECT_TRUE(torch::equal(output, torch::tensor({rank * 2 * 6.0F, (rank * 2 + 1) * 6.0F})));
  });
}

TEST(Collectives, RefuseWhatTheBackendWouldDieOf) {
  run_ranks(2, [](const ProcessGroup& group, int) {
    const auto whole = torch::empty({4});
    const auto part = torch::empty({2});
    EXPECT_ERROR(std::ignore = comm::all_gather(torch::empty({5}), part, group, "w"), c10::ValueError,
                 "all_gather of w: 5 elements are not 2 ranks times 2 elements");
    EXPECT_ERROR(std::ignore = comm::all_gather(whole, part.to(torch::kDouble), group, "w"), c10::ValueError, "dtypes");
    EXPECT_ERROR(std::ignore = comm::reduce_scatter(part, torch::empty({2, 2}).t(), group, "w"), c10::ValueError,
                 "contiguous");
    EXPECT_ERROR(std::ignore = comm::all_to_all(whole, {2, 2}, part, {1, 2}, group, "w"), c10::ValueError,
                 "all_to_all of w: counts [1, 2] for 2 elements");
    EXPECT_ERROR(std::ignore = comm::all_to_all(whole, {5, -1}, part, {1, 1}, group, "w"), c10::ValueError, "[5, -1]");
    EXPECT_ERROR(std::ignore = comm::all_to_all(whole, {4}, part, {1, 1}, group, "w"), c10::ValueError,
                 "1 counts for 2 ranks");
    EXPECT_ERROR(std::ignore = comm::all_to_all(whole.to(torch::kDouble), {2, 2}, part, {1, 1}, group, "w"),
                 c10::ValueError, "dtypes");
    EXPECT_ERROR(std::ignore = comm::all_reduce({torch::Tensor()}, group, "w"), c10::ValueError, "undefined");
    EXPECT_ERROR(std::ignore = comm::broadcast(part, 2, group, "w"), c10::ValueError, "root is 2");
    EXPECT_ERROR(std::ignore = comm::broadcast(part, 0, ProcessGroup(), "w"), c10::ValueError, "group is null");
    EXPECT_ERROR(std::ignore = comm::broadcast(torch::empty({2}, torch::kMeta), 0, group, "w"), c10::ValueError,
                 "no backend for tensors on meta");
  });
}

TEST(Collectives, APeerThatLeftIsNamed) {
  run_ranks(2, [](const ProcessGroup& group, int rank) {
    if (rank == 0) return;  // gone: its group is destroyed
    auto part = torch::ones({2});
    auto pending = comm::all_gather(torch::empty({4}), part, group, "blocks.3");
    for (int reader = 0; reader < 2; ++reader) {  // whoever waits again learns it too
      EXPECT_ERROR(pending.wait(), c10::DistError, "rank 1 of 2: all_gather of blocks.3 failed: ");
    }
  });
}

}  // namespace
}  // namespace fsdp
