// Threads that share a batch of independent work units, built for cores that other processes disturb.
//
// The caller works too and never waits for a helper that has not started: units are taken one by one from a counter, so
// if the operating system gives the helpers no time, the caller does everything itself. (An OpenMP region ends only when
// every thread of the team has been scheduled; beside a busy neighbour that is 8 to 16 ms, many times a step.)
// Helpers spin for a short while after a job, since the next one of the same step comes within microseconds, then sleep.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <mutex>
#include <thread>

static inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class ThreadPool {
  public:
    static ThreadPool& shared() {
        static ThreadPool* pool = new ThreadPool;  // never destroyed: helpers may outlive static destructors
        return *pool;
    }
    int threads() const { return wanted_; }
    void resize(int threads) {
        std::lock_guard<std::mutex> hold(caller_);
        wanted_ = std::max(1, threads);
        for (; started_ < wanted_ - 1; ++started_) std::thread([this, number = started_] { help(number); }).detach();
    }

    // body(unit) for every unit in [0, units), in any order, on any thread.
    template <typename Body>
    void run(long units, const Body& body) {
        if (units <= 1 || wanted_ == 1 || !caller_.try_lock()) {
            for (long unit = 0; unit < units; ++unit) body(unit);
            return;
        }
        call_ = [](const void* context, long unit) { (*static_cast<const Body*>(context))(unit); };
        context_ = &body;
        units_ = units;
        next_.store(0, std::memory_order_relaxed);
        open_.store(true);
        job_.fetch_add(1);
        if (asleep_.load() > 0) {
            keep_clear();
            syscall(SYS_futex, reinterpret_cast<uint32_t*>(&job_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
        }
        take(body);
        open_.store(false);
        for (int spins = 0; inside_.load() != 0; ++spins) {
            if (spins < 4096) relax();
            else std::this_thread::yield();
        }
        caller_.unlock();
    }

  private:
    ThreadPool() {
        CPU_ZERO(&allowed_);
        sched_getaffinity(0, sizeof allowed_, &allowed_);
    }

    template <typename Body>
    void take(const Body& body) {
        for (long unit; (unit = next_.fetch_add(1, std::memory_order_relaxed)) < units_;) body(unit);
    }

    // The kernel likes to wake a thread where its waker runs, and the two then share a core for many milliseconds:
    // helpers may run anywhere but on the core that the caller is on.
    void keep_clear() {
        const int here = sched_getcpu();
        if (here < 0 || here == clear_of_) return;
        cpu_set_t elsewhere = allowed_;
        CPU_CLR(here, &elsewhere);
        if (CPU_COUNT(&elsewhere) < wanted_ - 1) return;
        clear_of_ = here;
        for (int i = 0; i < std::min(started_, MOST_HELPERS); ++i)
            if (const int id = ids_[i].load()) sched_setaffinity(id, sizeof elsewhere, &elsewhere);
    }

    void help(int number) {
        if (number < MOST_HELPERS) ids_[number].store(int(syscall(SYS_gettid)));
        for (uint32_t seen = 0;;) {
            uint32_t job = job_.load();
            const auto began = std::chrono::steady_clock::now();
            while (job == seen && std::chrono::steady_clock::now() - began < PATIENCE) {
                for (int spins = 0; job == seen && spins < 64; ++spins, job = job_.load(std::memory_order_relaxed)) relax();
            }
            if (job == seen) {
                asleep_.fetch_add(1);
                syscall(SYS_futex, reinterpret_cast<uint32_t*>(&job_), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
                asleep_.fetch_sub(1);
                continue;
            }
            seen = job;
            if (number >= wanted_ - 1) continue;
            inside_.fetch_add(1);
            // Job fields change only while the job is closed and nobody is inside.
            if (open_.load())
                for (long unit; (unit = next_.fetch_add(1, std::memory_order_relaxed)) < units_;) call_(context_, unit);
            inside_.fetch_sub(1);
        }
    }

    // Longer than the host work between two steps: a helper that fell asleep is often woken on the caller's own core.
    static constexpr std::chrono::microseconds PATIENCE{300};

    static constexpr int MOST_HELPERS = 256;

    std::mutex caller_;
    cpu_set_t allowed_;
    int clear_of_ = -1;
    std::atomic<int> ids_[MOST_HELPERS] = {};
    std::atomic<int> wanted_{1};
    int started_ = 0;
    void (*call_)(const void*, long) = nullptr;
    const void* context_ = nullptr;
    long units_ = 0;
    alignas(64) std::atomic<long> next_{0};
    alignas(64) std::atomic<uint32_t> job_{0};
    alignas(64) std::atomic<int> inside_{0};
    std::atomic<bool> open_{false};
    std::atomic<int> asleep_{0};
};

template <typename Body>
static inline void parallel(long units, const Body& body) {
    ThreadPool::shared().run(units, body);
}

// Rows [first, last) in blocks of `grain`.
template <typename Body>
static inline void parallel_rows(long rows, long grain, const Body& body) {
    parallel((rows + grain - 1) / grain, [&](long block) { body(block * grain, std::min(rows, (block + 1) * grain)); });
}
