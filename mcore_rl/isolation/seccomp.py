"""The system calls that untrusted code may make, as a filter of classic BPF; pure.

The filter is an allow list: every other call fails with EPERM, including calls that later kernels
add. Calls that could reach another process (signals, limits, owners of descriptors) are allowed
only for the process itself. Calls that take memory which no limit counts are refused.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_* of linux/audit.h

# NAME:NUMBER on x86_64:NUMBER on aarch64, from asm/unistd.h; - where the call does not exist.
ANY_ARGUMENTS = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69
pwritev:296:70 lseek:8:62 close:3:57 creat:85:- stat:4:- fstat:5:80 lstat:6:-
newfstatat:262:79 statx:332:291 access:21:- faccessat:269:48 faccessat2:439:439 readlink:89:-
readlinkat:267:78 getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 mkdir:83:-
mkdirat:258:34 rmdir:84:- unlink:87:- unlinkat:263:35 rename:82:- renameat:264:38
renameat2:316:276 link:86:- linkat:265:37 symlink:88:- symlinkat:266:36 ftruncate:77:46
fsync:74:82 fdatasync:75:83 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59
flock:73:32 poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:-
epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441
eventfd2:290:19 umask:95:166 fadvise64:221:223 sendfile:40:71 copy_file_range:326:285 statfs:137:43
fstatfs:138:44 munmap:11:215 mprotect:10:226 madvise:28:233 brk:12:214 mincore:27:232
msync:26:227 membarrier:324:283 rseq:334:293 set_robust_list:273:99 futex:202:98
futex_waitv:449:449 set_tid_address:218:96 arch_prctl:158:- exit:60:93 exit_group:231:94
sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120
sched_get_priority_max:146:125 sched_get_priority_min:147:126 nanosleep:35:101
clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:-
times:100:153 getrusage:98:165 getpid:39:172 gettid:186:178 getppid:110:173 getuid:102:174
geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150
getgroups:115:158 getpgid:121:155 getpgrp:111:- getsid:124:156 getpriority:140:141 getrlimit:97:163
uname:63:160 sysinfo:99:179 getrandom:318:278 getcpu:309:168 rt_sigaction:13:134
rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigsuspend:130:133
rt_sigtimedwait:128:137 sigaltstack:131:132 restart_syscall:219:128 pause:34:- alarm:37:-
setitimer:38:103 getitimer:36:102 wait4:61:260 waitid:247:95 recvfrom:45:207 shutdown:48:210
getsockopt:55:209 getsockname:51:204 getpeername:52:205
"""
# Landlock does not govern these changes, and fallocate fills a disk faster than it is watched:
# these calls need a file system of the code's own.
OF_FILES = """
chmod:90:- fchmod:91:52 fchmodat:268:53 utimensat:280:88 utime:132:- utimes:235:- futimesat:261:-
truncate:76:45
fallocate:285:47
"""
# A program that gets these errors takes another way instead of giving up.
OTHER_ERRORS = {
    errno.ENOSYS: "clone3:435:435 openat2:437:437 io_uring_setup:425:425 memfd_create:319:279",
    errno.EACCES: "socket:41:198",
    errno.EAGAIN: "fork:57:- vfork:58:-",
    errno.ENOTSUP: "getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 "
    "llistxattr:195:12 flistxattr:196:13",
    # It lets a page of the stack grow into memory that RLIMIT_DATA does not count.
    errno.ENOMEM: "mremap:25:216",
}

OWN_PID = 0x7FFFFFFE  # above any process id of Linux

# A thread must share its descriptors, so that a supervisor sees all of them.
_CLONE_THREAD, _CLONE_FILES, _CLONE_NEW_ANYTHING = 0x00010000, 0x00000400, 0x7E020000
_O_ACCMODE, _O_TRUNC = 0o3, 0o1000
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_GROWSDOWN, _MAP_HUGETLB = 0x1, 0x20, 0x100, 0x40000
_AF_UNIX = 1
_CLOSE_RANGE_CLOEXEC = 4
# Without F_SETOWN and F_SETSIG, by which the kernel signals others, and F_SETPIPE_SZ.
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIOCLEX, FIONCLEX
_IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5451, 0x5450)
# PR_SET_NAME, PR_GET_NAME, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_VMA
_PRCTL_OPTIONS = (15, 16, 38, 22, 0x53564D41)

# Classic BPF over struct seccomp_data.
_LOAD, _AND, _EQUAL, _BIT_SET, _AT_LEAST, _GIVE = 0x20, 0x54, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_X32_BIT = 0x40000000
_Line = tuple[int, int, int, int]
_ALLOWED: _Line = (_GIVE, 0, 0, _ALLOW)


def _low(argument: int) -> _Line:
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument)


def _refuse(error: int) -> _Line:
    return (_GIVE, 0, 0, _ERRNO | error)


def _one_of(argument: int, values: Iterable[int]) -> list[_Line]:
    """Allow these values of an int argument, and refuse all others."""
    lines = [_low(argument)]
    for value in values:
        lines += [(_EQUAL, 0, 1, value), _ALLOWED]
    return [*lines, _refuse(errno.EPERM)]


def _unless_null(argument: int) -> list[_Line]:
    """Refuse a pointer that is not NULL, testing both halves."""
    high = (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument + 4)
    is_null = [(_EQUAL, 1, 0, 0), _refuse(errno.EPERM)]
    return [_low(argument), *is_null, high, *is_null]


def _open_modes(flags: int) -> list[_Line]:
    """Refuse modes of `open` for which Landlock requires no right; argument `flags` has them."""
    return [
        _low(flags),
        (_AND, 0, 0, _O_ACCMODE | _O_TRUNC),
        (_EQUAL, 0, 1, _O_TRUNC),
        _refuse(errno.EACCES),
        (_AND, 0, 0, _O_ACCMODE),
        (_EQUAL, 0, 1, _O_ACCMODE),
        _refuse(errno.EACCES),
        _ALLOWED,
    ]


# Calls that their arguments decide. A filter cannot follow pointers.
WITH_CONDITIONS: dict[str, list[_Line]] = {
    "open:2:-": _open_modes(1),
    "openat:257:56": _open_modes(2),
    "close_range:436:436": _one_of(2, (0, _CLOSE_RANGE_CLOEXEC)),  # without CLOSE_RANGE_UNSHARE
    # Refuse memory that RLIMIT_DATA does not count.
    "mmap:9:222": [
        _low(3),
        (_BIT_SET, 0, 1, _MAP_GROWSDOWN | _MAP_HUGETLB),
        _refuse(errno.ENOMEM),
        (_AND, 0, 0, _MAP_SHARED | _MAP_ANONYMOUS),
        (_EQUAL, 0, 1, _MAP_SHARED | _MAP_ANONYMOUS),
        _refuse(errno.ENOMEM),
        _ALLOWED,
    ],
    # Allow threads only, no processes.
    "clone:56:220": [
        _low(0),
        (_BIT_SET, 1, 0, _CLONE_THREAD),
        _refuse(errno.EAGAIN),
        (_BIT_SET, 1, 0, _CLONE_FILES),
        _refuse(errno.EPERM),
        (_BIT_SET, 0, 1, _CLONE_NEW_ANYTHING),
        _refuse(errno.EPERM),
        _ALLOWED,
    ],
    "fcntl:72:25": _one_of(1, _FCNTL_COMMANDS),
    "ioctl:16:29": _one_of(1, _IOCTL_REQUESTS),
    "kill:62:129": _one_of(0, (OWN_PID,)),
    "tgkill:234:131": _one_of(0, (OWN_PID,)),
    # Allow reading the limits of this process.
    "prlimit64:302:261": [*_unless_null(2), *_one_of(0, (0, OWN_PID))],
    "prctl:157:167": _one_of(0, _PRCTL_OPTIONS),
    "socketpair:53:199": _one_of(0, (_AF_UNIX,)),
    # Allow sending to the other end of a pair, never to an address.
    "sendto:44:206": [*_unless_null(4), _ALLOWED],
}


def allow_list(machine: str, *, own_files: bool) -> bytes:
    """Return the filter for `machine`, a key of `MACHINES`, with `OWN_PID` as the process id.

    `own_files`: the process reaches only files in its own file system or mounted read-only, so it
    may change times and modes.
    """
    lines: list[_Line] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, MACHINES[machine]),
        (_GIVE, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_GIVE, 0, 0, _KILL_PROCESS),
    ]
    allowed = ANY_ARGUMENTS + (OF_FILES if own_files else "")
    calls = {
        **dict.fromkeys(allowed.split(), [_ALLOWED]),
        **{each: [_refuse(error)] for error, some in OTHER_ERRORS.items() for each in some.split()},
        **WITH_CONDITIONS,
    }
    for call, conditions in calls.items():
        number = call.split(":")[1 + list(MACHINES).index(machine)]
        if number != "-":
            lines += [(_EQUAL, 0, len(conditions), int(number)), *conditions]
    lines.append(_refuse(errno.EPERM))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
