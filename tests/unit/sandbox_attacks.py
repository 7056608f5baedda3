"""Attacks on the sandbox, by protection: name -> snippet, which raises if it is refused.

They run one after another in one process, each in its own namespace. `host` has the targets
outside the sandbox; `call` makes a system call by its number on x86_64. An attack on the whole
machine only asks for the permission, so that a failing sandbox harms nothing.
"""

from __future__ import annotations

PRELUDE = """
import ctypes, errno, json, mmap, os, resource, signal, socket, struct, sys, threading, time

host = HOST
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
out = ctypes.create_string_buffer(8)


def call(number, *arguments):
    values = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    found = libc.syscall(ctypes.c_long(number), *values)
    if found == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def run(attacks):
    # Prints the names of those that succeed.
    found, names = [], dict(globals())
    for name, code in attacks.items():
        try:
            exec(code, dict(names))
            found.append(name)
        except BaseException:
            pass
    print(json.dumps(found))
"""

SIGNALS = {
    "kill": "os.kill(host['pid'], 9)",
    "kill: the parent": "os.kill(os.getppid(), 0)",
    "kill: the trainer": "os.kill(host['parent'], 0)",
    "kill: all": "os.kill(-1, 0)",
    "kill: its group": "os.kill(0, 18)",
    "kill: the first process": "os.kill(1, 0)",
    "killpg": "os.killpg(os.getpgid(host['pid']), 9)",
    "tgkill": "call(234, host['pid'], host['pid'], 9)",
    "tkill": "call(200, host['pid'], 9)",
    "sigqueue": "call(129, host['pid'], 9, ctypes.create_string_buffer(128))",
    "pidfd_open": "os.pidfd_open(host['pid'])",
    "pidfd_send_signal": "call(424, 3, 9, None, 0)",
    "kill by the owner of a descriptor": (
        "import fcntl\n"
        "r, w = os.pipe()\n"
        "fcntl.fcntl(r, 10, 9)\n"  # F_SETSIG
        "fcntl.fcntl(r, fcntl.F_SETOWN, host['pid'])\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\n"
        "os.write(w, b'x')"
    ),
    "kill by the owner of a socket": (
        "import fcntl, struct\n"
        "a, b = socket.socketpair()\n"
        "fcntl.ioctl(a, 0x8901, struct.pack('i', host['pid']))"  # FIOSETOWN
    ),
    "kill by a timer": "call(222, 0, ctypes.create_string_buffer(64), out)",
    "ptrace": "call(101, 16, host['pid'], 0, 0)",
    "ptrace: be traced": "call(101, 0, 0, 0, 0)",
    "process_vm_readv": "call(310, host['pid'], None, 0, None, 0, 0)",
    "process_vm_writev": "call(311, host['pid'], None, 0, None, 0, 0)",
    "process_madvise": "call(440, 3, None, 0, 21, 0)",
    "kcmp": "call(312, host['pid'], os.getpid(), 0, 0, 0)",
    "prlimit": "resource.prlimit(host['pid'], resource.RLIMIT_CPU, (1, 1))",
    "prlimit: look": "resource.prlimit(host['pid'], resource.RLIMIT_CPU)",
    "setrlimit": "resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))",
    "setpriority": "os.setpriority(os.PRIO_PROCESS, host['pid'], 19)",
    "setpriority: the user": "os.setpriority(os.PRIO_USER, 0, 0)",
    "ioprio_set": "call(251, 3, os.getuid(), 0)",
    "sched_setaffinity": "os.sched_setaffinity(host['pid'], {0})",
    "sched_setscheduler": "os.sched_setscheduler(host['pid'], os.SCHED_IDLE, os.sched_param(0))",
    "sched_setattr": "call(314, host['pid'], ctypes.create_string_buffer(64), 0)",
    "oom_score_adj": "open(f\"/proc/{host['pid']}/oom_score_adj\", 'w').write('1000')",
    "migrate_pages": "call(256, host['pid'], 0, None, None)",
    "all signals that its user may have pending": (
        "signal.pthread_sigmask(0, [40])\n"
        "for _ in range(1000): os.kill(os.getpid(), 40)\n"
        "num = 0\n"
        "while signal.sigtimedwait([40], 0): num += 1\n"
        "assert num > 100"
    ),
}

LIFETIME = {
    "parent-death signal": "assert libc.prctl(1, 0, 0, 0, 0) == 0",
    "subreaper": "assert libc.prctl(36, 1, 0, 0, 0) == 0",
    "setsid": "os.setsid()",
    "setpgid": "os.setpgid(0, 0)",
    "fork": "os.fork() or os._exit(0)",
    "vfork": "call(58)",
    "clone": "call(56, 17, 0, 0, 0, 0)",
    "clone of a namespace by a thread": "call(56, 0x10000 | 0x800 | 0x100 | 0x20000, 0, 0, 0, 0)",
    "clone3": "call(435, struct.pack('<8Q', 0, 0, 0, 0, 17, 0, 0, 0), 64)",
    "posix_spawn": "os.posix_spawn(sys.executable, [sys.executable, '-c', ''], {})",
    "exec": "os.execv(sys.executable, [sys.executable, '-c', 'pass'])",
    "execveat": "call(322, -100, b'/bin/true', None, None, 0)",
    "subprocess": "import subprocess; subprocess.run([sys.executable, '-c', ''])",
}

FILES = {
    "read a file": "open(host['secret']).read()",
    "write a file": "open(host['secret'], 'w')",
    "append to a file": "open(host['secret'], 'a').write('x')",
    "truncate": "os.truncate(host['secret'], 0)",
    "truncate by open": "os.close(os.open(host['secret'], os.O_RDONLY | os.O_TRUNC))",
    "truncate by open without access": (
        "open('mine', 'w').write('x'); os.close(os.open('mine', 3 | os.O_TRUNC))"
    ),
    "open without access": "os.close(os.open(host['secret'], 3))",
    "unlink": "os.unlink(host['secret'])",
    "rename out": "os.rename(host['secret'], 'mine')",
    "rename in": "open('mine', 'w'); os.rename('mine', host['folder'] + '/new')",
    "hard link": "os.link(host['secret'], 'link')",
    "hard link of Python": "os.link(os.__file__, 'link'); open('link', 'a')",
    "symbolic link": "os.symlink(host['secret'], 'symbolic'); open('symbolic').read()",
    "symbolic link outside": "os.symlink('/', host['folder'] + '/new')",
    "make a file": "open(host['folder'] + '/new', 'w')",
    "make a folder": "os.mkdir(host['folder'] + '/new')",
    "chmod": "os.chmod(host['secret'], 0o777)",
    "chmod of Python": "os.chmod(os.__file__, 0o777)",
    "chown": "os.chown(host['secret'], 1000, 1000)",
    "utime": "os.utime(host['secret'], (0, 0))",
    "setxattr": "os.setxattr(host['secret'], 'user.x', b'x')",
    "getxattr": "os.getxattr(host['secret'], 'user.x')",
    "list a folder": "os.listdir(host['folder'])",
    "list the home": "assert os.listdir('/root') == [] or os.listdir('/home')",
    "the project": "open(host['project'] + '/pyproject.toml').read()",
    "ssh keys": "os.listdir(os.path.expanduser('~root/.ssh'))",
    "passwords": "open('/etc/passwd').read()",
    "openat2": "call(437, -100, host['secret'].encode(), ctypes.create_string_buffer(24), 24)",
    "open by handle": "call(304, -100, ctypes.create_string_buffer(128), 0)",
    "name to handle": "call(303, -100, b'/', ctypes.create_string_buffer(128), out, 0)",
    "write Python": "open(os.__file__, 'a')",
    "write into site-packages": "open(os.path.dirname(os.__file__) + '/mine.py', 'w')",
    "write into /": "open('/mine', 'w')",
    "write into /tmp": "open('/tmp/mine', 'w')",
    "root of /proc": "open('/proc/self/root' + host['secret']).read()",
    "root of the first process": "open('/proc/1/root' + host['secret']).read()",
    "cwd of the trainer": "os.listdir(f\"/proc/{host['parent']}/cwd\")",
    "environment of the trainer": "open(f\"/proc/{host['parent']}/environ\").read()",
    "memory of the trainer": "open(f\"/proc/{host['parent']}/mem\", 'rb')",
    "command line of others": "open('/proc/1/cmdline').read()",
    "list processes": "os.listdir('/proc')",
    "/sys": "os.listdir('/sys')",
    "/run": "os.listdir('/run')",
    "sysrq": "open('/proc/sysrq-trigger', 'w')",
    "core pattern": "open('/proc/sys/kernel/core_pattern', 'w')",
    "cgroup release_agent": "open('/sys/fs/cgroup/memory/release_agent', 'w')",
    "cgroup procs": "open('/sys/fs/cgroup/unified/cgroup.procs', 'w')",
    "/dev/shm": "open(host['shm']).read()",
    "/dev/shm: write": "open('/dev/shm/mine', 'w')",
    "list /dev/shm": "os.listdir('/dev/shm')",
    "terminals": "os.listdir('/dev/pts')",
    "a terminal": "open('/dev/tty')",
    "a new terminal": "os.openpty()",
    "/dev/mem": "open('/dev/mem', 'rb')",
    "/dev/zero": "open('/dev/zero', 'rb')",
    "/dev/fuse": "open('/dev/fuse', 'rb')",
    "disks": "open('/dev/vda', 'rb').read(1)",
    "mknod of a disk": "os.mknod('disk', 0o60600, os.makedev(254, 0)); open('disk', 'rb')",
    "fifo": "os.mkfifo('fifo')",
    "chroot": "os.chroot('.')",
    "pivot_root": "call(155, b'.', b'.')",
    "mount": "call(165, b'none', b'.', b'tmpfs', 0, None)",
    "umount": "call(166, b'/sandbox', 2)",
    "open_tree": "call(428, -100, b'/', 1)",
    "fsopen": "call(430, b'tmpfs', 0)",
    "unshare: user": "call(272, 0x10000000)",
    "unshare: mounts": "call(272, 0x20000)",
    "setns": "call(308, 0, 0)",
    "swapon": "call(167, b'x', 0)",
    "quotactl": "call(179, 0, None, 0, None)",
    "fanotify": "call(300, 0, 0)",
    "inotify": "call(294, 0)",
    "lookup_dcookie": "call(212, 0, None, 0)",
}

DESCRIPTORS = {
    "descriptors of others": (
        "import stat\n"
        "there = []\n"
        "for fd in range(3, 1024):\n"
        "    try: found = os.fstat(fd)\n"
        "    except OSError: continue\n"
        "    own = os.path.samestat(found, os.stat('.'))\n"  # its folder
        "    there.append(own or stat.S_ISFIFO(found.st_mode))\n"
        "assert not all(there)"
    ),
    "descriptors of a thread's own": "call(56, 0x10000 | 0x800 | 0x100, 0, 0, 0, 0)",
    "descriptors unshared": "call(436, 90, 100, 2)",
    "pidfd_getfd": "call(438, 3, 0, 0)",
    "write into the terminal": "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",  # TIOCSTI
    "paste into the terminal": "import fcntl; fcntl.ioctl(0, 0x541C, b'\\x03')",  # TIOCLINUX
    "pass descriptors": ("a, b = socket.socketpair()\nsocket.send_fds(a, [b'x'], [0])"),
}

NETWORK = {
    "tcp": "socket.socket()",
    "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "ipv6": "socket.socket(socket.AF_INET6)",
    "raw": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "packet": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "vsock": "socket.socket(socket.AF_VSOCK)",
    "bluetooth": "socket.socket(31, socket.SOCK_RAW)",
    "alg": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "unix": "socket.socket(socket.AF_UNIX).connect(host['path'])",
    "abstract": "socket.socket(socket.AF_UNIX).connect(host['abstract'])",
    "connect a pair": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.connect(host['path'])"
    ),
    "send from a pair": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', host['path'])"
    ),
    "send from a pair to an abstract name": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "a.sendto(b'x', host['abstract'])"
    ),
    "sendmsg": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "a.sendmsg([b'x'], [], 0, host['abstract'])"
    ),
    "bind a pair": "a, b = socket.socketpair(); a.bind('bound')",
    "listen on a pair": "a, b = socket.socketpair(); a.listen()",
    "pair of another kind": "call(53, 30, 1, 0, ctypes.create_string_buffer(8))",  # AF_TIPC
    "io_uring": "call(425, 8, ctypes.create_string_buffer(256))",
}

MEMORY = {
    "memfd_create": "os.memfd_create('m')",
    "memfd_secret": "call(447, 0)",
    "shared memory": "mmap.mmap(-1, 4096)",
    "shared memory, validated": (
        "libc.mmap.restype = ctypes.c_long\n"
        "assert libc.mmap(None, ctypes.c_size_t(4096), 3, 0x23, -1, ctypes.c_long(0)) != -1"
    ),
    "growing memory": "mmap.mmap(-1, 4096, flags=0x122)",
    "huge pages": "mmap.mmap(-1, 2 << 20, flags=0x40022)",
    "private memory": "bytearray(2 << 30)",
    "memory by brk": "assert libc.sbrk(ctypes.c_long(2 << 30)) != -1",
    "remapped memory": (
        "m = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\nm.resize(2 << 30)"
    ),
    "memory by a page of the stack": (
        "libc.mremap.restype = ctypes.c_long\n"
        "page = ctypes.c_void_p.in_dll(libc, '__libc_stack_end').value - 81920 & ~4095\n"
        "assert libc.mremap(ctypes.c_void_p(page), ctypes.c_size_t(4096),"
        " ctypes.c_size_t(2 << 30), 1) != -1"
    ),
    "protected memory": (
        "libc.mmap.restype = ctypes.c_void_p\n"
        "p = libc.mmap(None, ctypes.c_size_t(2 << 30), 0, 0x22, -1, ctypes.c_long(0))\n"
        "assert libc.mprotect(ctypes.c_void_p(p), ctypes.c_size_t(2 << 30), 3) == 0"
    ),
    "shmget": "call(29, 0, 4096, 0o1600)",
    "shm_open": "open('/dev/shm/psm_mine', 'x')",
    "msgget": "call(68, 0, 0o1600)",
    "semget": "call(64, 0, 1, 0o1600)",
    "mq_open": "call(240, b'm', 0o102, 0o600, None)",
    "a pipe that is large": "import fcntl; r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20)",
    "many descriptors": "held = [os.pipe() for _ in range(200)]",
    "vmsplice": "call(278, 1, None, 0, 0)",
    "mlockall": "call(151, 3)",
    "add_key": "call(248, b'user', b'k', b'x', 1, -3)",
    "request_key": "call(249, b'user', b'k', None, -3)",
    "keyctl": "call(250, 0, -3, 0)",
}

KERNEL = {
    "userfaultfd": "call(323, 1)",
    "bpf": "call(321, 0, ctypes.create_string_buffer(128), 128)",
    "perf_event_open": "call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0)",
    "seccomp": "call(317, 1, 8, None)",
    "landlock": "call(444, None, 0, 1)",
    "personality": "call(135, 0x40000)",
    "modify_ldt": "call(154, 0, None, 0)",
    "iopl": "call(172, 3)",
    "init_module": "call(175, None, 0, b'')",
    "finit_module": "call(313, 0, b'', 0)",
    "kexec_load": "call(246, 0, 0, None, 0)",
    "reboot": "call(169, 0xfee1dead, 672274793, 0x7FFFFFFF, None)",
    "syslog": "call(103, 3, ctypes.create_string_buffer(16), 16)",
    "sethostname": "socket.sethostname('mine')",
    "settimeofday": "call(164, None, None)",
    "adjtimex": "call(159, ctypes.create_string_buffer(208))",
    "acct": "call(163, None)",
    "setuid": "os.setuid(12345)",
    "setgroups": "os.setgroups([0])",
    "capset": "call(126, ctypes.create_string_buffer(struct.pack('Ii', 0x20080522, 0)), None)",
    "nice": "os.nice(-1)",
    "a core dump": ("assert resource.getrlimit(resource.RLIMIT_CORE)[1] > 0"),
    "a call that is not there yet": "call(700)",
}

ATTACKS = {
    **{"signals": SIGNALS, "lifetime": LIFETIME, "files": FILES, "descriptors": DESCRIPTORS},
    **{"network": NETWORK, "memory": MEMORY, "kernel": KERNEL},
}

# Code that exceeds a limit or never ends.
_WRITE = "file = open(name, 'wb', 0)\n    for _ in range(60): file.write(bytes(1 << 20))\n"
_EACH = "import os, time\nheld = []\nfor number in range(24):\n    name = f'f{number}'\n    "
_TOLD = "    print((number + 1) * 60, flush=True)\ntime.sleep(600)"
HOGS = {
    "bytes": _EACH + _WRITE + _TOLD,
    "bytes of removed files": (f"{_EACH}{_WRITE}    held.append(file); os.unlink(name)\n{_TOLD}"),
    "bytes of files without a name": (
        f"{_EACH}name = os.open('.', os.O_TMPFILE | os.O_RDWR)\n    {_WRITE}"
        f"    held.append(file)\n{_TOLD}"
    ),
    "bytes of mapped files": (
        "import mmap\n" + _EACH + "file = open(name, 'w+b'); file.truncate(60 << 20)\n"
        "    held.append(mmap.mmap(file.fileno(), 60 << 20)); file.close(); os.unlink(name)\n"
        f"    for at in range(0, 60 << 20, 4096): held[-1][at] = 1\n{_TOLD}"
    ),
    "bytes in a folder that is not listed": (
        "import os; os.mkdir('h', 0o300); os.chdir('h')\n" + _EACH + _WRITE + _TOLD
    ),
    "bytes far down": (
        "import os\nfor _ in range(30): os.mkdir('d' * 200); os.chdir('d' * 200)\n"
        + _EACH
        + _WRITE
        + _TOLD
    ),
    "bytes of removed files, its first thread gone": (
        "import ctypes, os, threading, time\n"
        "def go():\n"
        "    held = []\n"
        "    for number in range(24):\n"
        "        file = open('f', 'wb', 0); os.unlink('f'); held.append(file)\n"
        "        for _ in range(20): file.write(bytes(1 << 20))\n"
        "        time.sleep(0.1); print((number + 1) * 20, flush=True)\n"
        "    time.sleep(600)\n"
        "threading.Thread(target=go).start()\n"
        "ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)"
    ),
    # Reading a folder changes its access time: what is not read yet then moves to what is.
    "bytes of files that move while they are counted": (
        "import os, sys, threading, time\n"
        "sys.setswitchinterval(1e-5); os.mkdir('A'); os.mkdir('B')\n"
        "last, first = os.listdir(); os.mkdir(f'{last}/d')\n"
        "for number in range(1500): open(f'{first}/{number}', 'w').close()\n"
        "def move():\n"
        "    while True:\n"
        "        open(f'{first}/t', 'w').close(); os.unlink(f'{first}/t')\n"
        "        old = os.stat(first).st_atime_ns\n"
        "        while os.stat(first).st_atime_ns == old: pass\n"
        "        os.rename(f'{last}/d', 'd'); time.sleep(0.02); os.rename('d', f'{last}/d')\n"
        "threading.Thread(target=move).start()\n"
        "d = os.open(f'{last}/d', os.O_RDONLY)\n"
        "for number in range(48):\n"
        "    file = os.open(str(number), os.O_WRONLY | os.O_CREAT, dir_fd=d)\n"
        "    for _ in range(5): os.write(file, bytes(1 << 20))\n"
        "    os.close(file); time.sleep(0.03); print((number + 1) * 5, flush=True)\n"
        "time.sleep(600)"
    ),
    "files": "import itertools\nfor n in itertools.count(): open(str(n), 'w').close()",
    "folders": "import os\nwhile True: os.mkdir('d'); os.chdir('d')",
    "threads": (
        "import threading, time\nthreading.stack_size(1 << 16)\n"
        "while True: threading.Thread(target=time.sleep, args=(600,)).start()"
    ),
}
