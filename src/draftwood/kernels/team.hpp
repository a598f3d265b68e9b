// Threads that work through stages together.
//
// A stage is a number of items; threads take items until none is left, and nobody enters the next
// stage before all are done. A thread that another program keeps from running is not waited for:
// the others take its items, and it runs through the finished stages when it comes back.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <memory>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace dw {

// A counter to wait on: spins for some tens of microseconds, then sleeps. Sleeping matters when
// other programs want the cores: a spinning thread would keep its core from the thread it waits
// for.
class Counter {
  public:
    // Adds one; whoever makes it `goal` wakes the waiting.
    void add(int goal) {
        if (value_.fetch_add(1) + 1 == goal && sleepers_.load() > 0) wake();
    }

    void wait(int goal) {
        for (int spin = 0; spin < kSpins; ++spin) {
            if (value_.load(std::memory_order_acquire) == goal) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        sleepers_.fetch_add(1);
        for (int now = value_.load(); now != goal; now = value_.load()) sleep(now);
        sleepers_.fetch_sub(1);
    }

  private:
    static constexpr int kSpins = 4000;

#if defined(__linux__)
    void sleep(int now) {
        syscall(SYS_futex, reinterpret_cast<int*>(&value_), FUTEX_WAIT_PRIVATE, now, nullptr,
                nullptr, 0);
    }
    void wake() {
        syscall(SYS_futex, reinterpret_cast<int*>(&value_), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr,
                nullptr, 0);
    }
#else
    void sleep(int) { sched_yield(); }
    void wake() {}
#endif

    std::atomic<int> value_{0};
    std::atomic<int> sleepers_{0};
};
static_assert(sizeof(std::atomic<int>) == sizeof(int), "the futex is the atomic's own word");

struct alignas(64) Stage {
    std::atomic<int> next{0};
    Counter done;
};

// One thread's view of a team.
class Member {
  public:
    Member(int thread, int threads, Stage* stages) : thread(thread), threads(threads), stages_(stages) {}

    const int thread, threads;

    // The next stage: f(item) for every item of `count`, shared out among the team. All members
    // pass the same counts in the same order.
    template <class F>
    void each(int count, F f) {
        Stage& stage = *stages_++;
        for (int i = stage.next.fetch_add(1); i < count; i = stage.next.fetch_add(1)) {
            f(i);
            stage.done.add(count);
        }
        stage.done.wait(count);
    }

    // Into how many pieces to cut `count` things of equal size: enough to even out the threads.
    int pieces(int count) const { return std::min(count, threads == 1 ? 1 : 4 * threads); }

  private:
    Stage* stages_;
};

// Runs f(member) on at most `threads` of PyTorch's OpenMP threads, through `stages` stages.
template <class F>
static void in_parallel(int threads, int stages, F f) {
    const std::unique_ptr<Stage[]> all(new Stage[stages]);
    Counter left;
#pragma omp parallel num_threads(threads)
    {
        const int team = omp_get_num_threads();
        f(Member(omp_get_thread_num(), team, all.get()));
        // All meet here before they meet at OpenMP's own barrier, which would spin.
        left.add(team);
        left.wait(team);
    }
}

}  // namespace dw
