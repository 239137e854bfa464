/*
 * steps PROGRAM ARGUMENT...: runs PROGRAM instruction by instruction until it has written to standard output, and prints the offset of
 * each instruction of its own that some thread executed, in hexadecimal. For x86-64.
 */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST (64UL << 20)
static unsigned char executed[MOST];

int main(int argc, char **argv)
{
	unsigned long base = 0, steps = 0;
	char name[64];
	int out[2], status;
	FILE *maps;
	pid_t child;

	if (argc < 2 || pipe(out))
		return 1;
	child = fork();
	if (!child) {
		dup2(out[1], 1);
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		execv(argv[1], argv + 1);
		_exit(127);
	}
	waitpid(child, &status, 0);
	ptrace(PTRACE_SETOPTIONS, child, 0, PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL);
	snprintf(name, sizeof(name), "/proc/%d/maps", child);
	maps = fopen(name, "r");
	if (!maps || fscanf(maps, "%lx", &base) != 1)
		return 1;
	ptrace(PTRACE_SINGLESTEP, child, 0, 0);
	for (;;) {
		struct user_regs_struct regs;
		struct pollfd written = { out[0], POLLIN, 0 };
		pid_t thread = waitpid(-1, &status, __WALL);
		int sig;

		if (thread < 0 || (thread == child && !WIFSTOPPED(status)))
			break;
		if (!WIFSTOPPED(status))
			continue;
		if (!ptrace(PTRACE_GETREGS, thread, 0, &regs) && regs.rip - base < MOST)
			executed[regs.rip - base] = 1;
		/* A new thread begins with a stop. */
		sig = WSTOPSIG(status);
		ptrace(PTRACE_SINGLESTEP, thread, 0, sig == SIGTRAP || sig == SIGSTOP ? 0 : sig);
		if (++steps % 256 == 0 && poll(&written, 1, 0) > 0)
			break;
	}
	kill(child, SIGKILL);
	for (unsigned long at = 0; at < MOST; at++)
		if (executed[at])
			printf("%lx\n", at);
	return 0;
}
