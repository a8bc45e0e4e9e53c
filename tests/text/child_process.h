// Runs a function in a real child process and brings its text back: for limits,
// mounts and users that must not touch the test itself.
#ifndef COSFORMER_TESTS_TEXT_CHILD_PROCESS_H_
#define COSFORMER_TESTS_TEXT_CHILD_PROCESS_H_

#include <grp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

namespace cosformer::testing {

struct ChildResult {
  int exit_status = -1;  // -1: ended by a signal
  int signal = 0;
  std::string text;
};

// body's return value becomes the exit status' text.
inline ChildResult run_in_child(const std::function<std::string()>& body) {
  int ends[2];
  ChildResult result;
  if (::pipe(ends) != 0) return result;
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    const std::string text = body();
    size_t at = 0;
    while (at < text.size()) {
      const ssize_t n = ::write(ends[1], text.data() + at, text.size() - at);
      if (n <= 0) ::_exit(3);
      at += static_cast<size_t>(n);
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  char part[4096];
  ssize_t n;
  while ((n = ::read(ends[0], part, sizeof part)) > 0) {
    result.text.append(part, static_cast<size_t>(n));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status)) result.exit_status = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  return result;
}

// Permissions do not stop root: continue as the user nobody.
inline bool become_nobody() {
  if (::geteuid() != 0) return true;
  constexpr uid_t kNobody = 65534;
  return ::setgroups(0, nullptr) == 0 && ::setgid(kNobody) == 0 &&
         ::setuid(kNobody) == 0;
}

inline bool limit_file_size(rlim_t bytes) {
  const rlimit limit{bytes, bytes};
  return ::setrlimit(RLIMIT_FSIZE, &limit) == 0;
}

// A file system of 64 KiB on folder, seen by this process alone. False where
// the system does not let us.
inline bool mount_small_disk(const std::string& folder) {
  if (::unshare(CLONE_NEWNS) != 0 &&
      ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) {
    return false;
  }
  ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
  return ::mount("none", folder.c_str(), "tmpfs", 0, "size=64k") == 0;
}

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_TEXT_CHILD_PROCESS_H_
