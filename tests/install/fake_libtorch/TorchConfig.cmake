# A LibTorch that only has a version and an ABI, for refusals.sh.
set(TORCH_CXX_FLAGS "${FAKE_CXX_FLAGS}")
