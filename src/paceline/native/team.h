// One walk by all threads of a call: those of torch's own OpenMP, or threads started for it.
#pragma once

#include <thread>
#include <vector>

#include "call.h"

// walk(job, t, T) for every thread t of T; T may turn out smaller than asked.
template <class Job> static void in_team(Job& job, int64_t threads, const Team& team) {
  struct Entry { Job& job; const Team& team; } entry{job, team};
  if (threads == 1) walk(job, 0, 1);
  else if (team.parallel) {
    auto enter = [](void* at) { auto& own = *(Entry*)at; walk(own.job, own.team.thread_number(), own.team.thread_count()); };
    team.parallel(enter, &entry, (unsigned)threads, 0);
  } else {
    std::vector<std::thread> others;
    for (int t = 1; t < threads; t++) others.emplace_back([&job, threads, t] { walk(job, t, (int)threads); });
    walk(job, 0, (int)threads);
    for (auto& other : others) other.join();
  }
}
