#include <gtest/gtest.h>

#include "support/spawn_ranks.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (const auto exit_code = fsdp::testing::run_selected_body()) return *exit_code;
  return RUN_ALL_TESTS();
}
