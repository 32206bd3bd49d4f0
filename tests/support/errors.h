#pragma once
// Expecting an error of one type whose message holds some text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/run_ranks.h"

// EXPECT_ERROR(statement, c10::ValueError, "WORLD_SIZE"): exactly as EXPECT_THROW, and the message contains the text.
#define EXPECT_ERROR(statement, type, text)                                                                          \
  do {                                                                                                               \
    bool fsdp_threw = false;                                                                                         \
    try {                                                                                                            \
      statement;                                                                                                     \
    } catch (const type& fsdp_error) {                                                                               \
      fsdp_threw = true;                                                                                             \
      EXPECT_THAT(::fsdp::testing::message_of(fsdp_error), ::testing::HasSubstr(text));                              \
    } catch (const std::exception& fsdp_error) {                                                                     \
      fsdp_threw = true;                                                                                             \
      ADD_FAILURE() << #statement " threw another type than " #type ": " << ::fsdp::testing::message_of(fsdp_error); \
    }                                                                                                                \
    if (!fsdp_threw) ADD_FAILURE() << #statement " did not throw " #type;                                            \
  } while (false)
