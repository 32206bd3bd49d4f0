// Carries the precompiled header; see FsdpTargets.cmake.
