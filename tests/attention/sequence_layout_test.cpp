// Which rank holds which tokens, and what that costs each.
#include <fsdp/sequence_layout.h>

#include "support/errors.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

constexpr auto kBySplit = {SequenceSplit::kContiguous, SequenceSplit::kHeadTail};

std::vector<int64_t> to_vector(const at::Tensor& index) {
  return {index.data_ptr<int64_t>(), index.data_ptr<int64_t>() + index.numel()};
}

std::vector<int64_t> head_tail_of(int64_t length, int64_t rank, int64_t num_ranks) {
  return to_vector(local_positions(length, rank, num_ranks, SequenceSplit::kHeadTail));
}

TEST(SequenceLayout, HeadAndTailGoTogether) {
  EXPECT_EQ(head_tail_of(8, 0, 2), (std::vector<int64_t>{0, 1, 6, 7}));
  EXPECT_EQ(head_tail_of(8, 1, 2), (std::vector<int64_t>{2, 3, 4, 5}));
  EXPECT_EQ(head_tail_of(16, 1, 4), (std::vector<int64_t>{2, 3, 12, 13}));
  EXPECT_EQ(head_tail_of(6, 0, 2), (std::vector<int64_t>{0, 1, 5}));  // chunks of 2, 2, 1, 1
  EXPECT_EQ(head_tail_of(6, 1, 2), (std::vector<int64_t>{2, 3, 4}));
}

TEST(SequenceLayout, ContiguousIsTheRuleOfShard) {
  EXPECT_EQ(to_vector(local_positions(5, 0, 2, SequenceSplit::kContiguous)), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(to_vector(local_positions(5, 1, 2, SequenceSplit::kContiguous)), (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(num_local_tokens(4, 2, 3, SequenceSplit::kContiguous), 0);
}

TEST(SequenceLayout, EveryTokenIsHeldOnceAndComesBack) {
  for (int64_t num_ranks = 1; num_ranks <= 5; ++num_ranks) {
    for (int64_t length = 1; length <= 23; ++length) {
      for (const auto split : kBySplit) {
        std::vector<at::Tensor> rows;
        for (int64_t rank = 0; rank < num_ranks; ++rank) {
          rows.push_back(local_positions(length, rank, num_ranks, split));
          EXPECT_EQ(rows.back().numel(), num_local_tokens(length, rank, num_ranks, split));
        }
        const auto gathered = torch::cat(rows);
        ASSERT_EQ(gathered.numel(), length);
        const auto restored = gathered.index_select(0, restore_index(length, num_ranks, split));
        EXPECT_TRUE(at::equal(restored, torch::arange(length))) << length << " tokens on " << num_ranks;
      }
    }
  }
}

TEST(SequenceLayout, HeadTailBalances) {
  const auto pairs = [](int64_t length, int64_t rank, int64_t num_ranks, SequenceSplit split) {
    return attended_pairs(length, rank, num_ranks, split);
  };
  EXPECT_EQ(pairs(8, 0, 2, SequenceSplit::kContiguous), 10);
  EXPECT_EQ(pairs(8, 1, 2, SequenceSplit::kContiguous), 26);
  EXPECT_EQ(pairs(8, 0, 2, SequenceSplit::kHeadTail), 18);
  EXPECT_EQ(pairs(8, 1, 2, SequenceSplit::kHeadTail), 18);
  for (int64_t rank = 0; rank < 4; ++rank) EXPECT_EQ(pairs(16, rank, 4, SequenceSplit::kHeadTail), 34);
  for (int64_t length = 8; length <= 40; ++length) {  // uneven: about one token more, of at most `length` pairs
    const auto first = pairs(length, 0, 2, SequenceSplit::kHeadTail),
               second = pairs(length, 1, 2, SequenceSplit::kHeadTail);
    EXPECT_EQ(first + second, length * (length + 1) / 2);
    EXPECT_LE(std::abs(first - second), length + 1) << length;
  }
}

TEST(SequenceLayout, DocumentsAreBalancedOneByOne) {
  EXPECT_EQ(to_vector(document_positions({4, 12}, 0, 2)), (std::vector<int64_t>{0, 3, 4, 5, 6, 13, 14, 15}));
  EXPECT_EQ(to_vector(document_positions({4, 12}, 1, 2)), (std::vector<int64_t>{1, 2, 7, 8, 9, 10, 11, 12}));
  for (const int64_t rank : {0, 1}) {
    EXPECT_EQ(
        attended_pairs(4, rank, 2, SequenceSplit::kHeadTail) + attended_pairs(12, rank, 2, SequenceSplit::kHeadTail),
        44);
  }
  const std::vector<int64_t> lengths{8, 16, 24};
  std::vector<at::Tensor> rows;
  for (int64_t rank = 0; rank < 4; ++rank) rows.push_back(document_positions(lengths, rank, 4));
  const auto gathered = torch::cat(rows);
  EXPECT_TRUE(at::equal(gathered.index_select(0, gathered.argsort()), torch::arange(48)));
  EXPECT_ERROR(std::ignore = document_positions({4, 6}, 0, 2), c10::ValueError,
               "a document of 6 tokens cannot be cut into 4 equal chunks (2 for each of 2 ranks)");
  EXPECT_ERROR(std::ignore = document_positions({}, 0, 2), c10::ValueError, "no documents");
}

TEST(SequenceLayout, RefusesWhatIsNoLayout) {
  for (const auto split : kBySplit) {
    EXPECT_ERROR(std::ignore = local_positions(0, 0, 2, split), c10::ValueError, "sequence_length is 0");
    EXPECT_ERROR(std::ignore = restore_index(8, 0, split), c10::ValueError, "num_ranks is 0");
    EXPECT_ERROR(std::ignore = num_local_tokens(8, 2, 2, split), c10::ValueError,
                 "rank is 2, but there are ranks 0 to 1");
    EXPECT_ERROR(std::ignore = attended_pairs(8, -1, 2, split), c10::ValueError, "rank is -1");
  }
}

}  // namespace
}  // namespace fsdp::testing
