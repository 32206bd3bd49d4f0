// What a launcher sets is read strictly: an error names the variable.
#include "comm/environment.h"

#include <gtest/gtest.h>

#include "support/errors.h"
#include "support/scoped_environment.h"

namespace fsdp {
namespace {

using testing::ScopedEnvironment;
using Changes = std::map<std::string, std::optional<std::string>>;

Changes complete_environment() {
  return {{"RANK", "1"},
          {"WORLD_SIZE", "4"},
          {"LOCAL_RANK", "1"},
          {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "10.0.0.1"},
          {"MASTER_PORT", "29400"},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
          {"TORCHELASTIC_RUN_ID", "job"},
          {"TORCHELASTIC_RESTART_COUNT", "2"}};
}

comm::Environment read_with(const std::string& name, const std::optional<std::string>& value) {
  auto changes = complete_environment();
  changes[name] = value;
  const ScopedEnvironment scoped(changes);
  return comm::read_environment();
}

TEST(Environment, IsReadAsTheLauncherSetIt) {
  const auto env = read_with("RANK", "3");
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.master_addr, "10.0.0.1");
  EXPECT_EQ(env.master_port, 29400);
  EXPECT_TRUE(env.use_agent_store);
  EXPECT_EQ(env.run_id, "job");
  EXPECT_EQ(env.restart_count, 2);
}

TEST(Environment, OptionalVariablesHaveDefaults) {
  auto changes = complete_environment();
  for (const auto* name : {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID",
                           "TORCHELASTIC_RESTART_COUNT"}) {
    changes[name] = std::nullopt;
  }
  const ScopedEnvironment scoped(changes);
  const auto env = comm::read_environment();
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, std::nullopt);
  EXPECT_FALSE(env.use_agent_store);
  EXPECT_EQ(env.restart_count, 0);
}

TEST(Environment, AMissingVariableIsNamed) {
  for (const std::string name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    EXPECT_ERROR(std::ignore = read_with(name, std::nullopt), c10::ValueError, name + " is not set");
    EXPECT_ERROR(std::ignore = read_with(name, ""), c10::ValueError, name + " is not set");
  }
}

TEST(Environment, AMalformedVariableIsNamed) {
  const std::vector<std::pair<std::string, std::string>> cases{{"RANK", "one"},
                                                               {"RANK", "-1"},
                                                               {"RANK", "1x"},
                                                               {"WORLD_SIZE", "0"},
                                                               {"WORLD_SIZE", "2.5"},
                                                               {"LOCAL_RANK", "-1"},
                                                               {"MASTER_PORT", "0"},
                                                               {"MASTER_PORT", "70000"},
                                                               {"LOCAL_WORLD_SIZE", "x"},
                                                               {"TORCHELASTIC_USE_AGENT_STORE", "maybe"},
                                                               {"TORCHELASTIC_RESTART_COUNT", "-2"}};
  for (const auto& [name, value] : cases) {
    EXPECT_ERROR(std::ignore = read_with(name, value), c10::ValueError, c10::str(name, " is \"", value, "\""));
  }
}

TEST(Environment, AContradictionIsNamed) {
  EXPECT_ERROR(std::ignore = read_with("RANK", "4"), c10::ValueError, "RANK is 4 but WORLD_SIZE is 4");
  EXPECT_ERROR(std::ignore = read_with("LOCAL_RANK", "2"), c10::ValueError,
               "LOCAL_RANK is 2 but LOCAL_WORLD_SIZE is 2");
  EXPECT_ERROR(std::ignore = read_with("LOCAL_WORLD_SIZE", "5"), c10::ValueError, "LOCAL_WORLD_SIZE is 5");
}

}  // namespace
}  // namespace fsdp
