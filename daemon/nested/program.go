package nested

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// maxLevels bounds the PID namespaces between a task and the container of the pod, and those above this process.
const maxLevels = 8

// The values of the map known: a mount namespace whose execs need not stop, one in which only updaters stop, and one in
// which every exec stops because an updater runs.
const (
	knownOwn uint32 = iota
	knownSettled
	knownAside
)

// event is a process that the program has stopped. Its layout is that of the record in the ring buffer.
type event struct {
	Start uint64 // of the process, in ns since the boot
	Mount uint64 // the number of the mount namespace, which is never used again
	Netns uint32 // the inode of the pod's netns
	PID   uint32 // as this process sees it
	Owner uint32 // the first process of the pod's container, as this process sees it
	Flags uint32
	Name  [16]byte
}

// flagJob is in the flags of an event if the process was not stopped: a shell with job control, such as an interactive
// one, takes note of a stop of the jobs that it has started, and goes on to its next command.
const flagJob = 1

// flagLook is in the flags of an event if the last look at the container was lookInterval ago.
const flagLook = 2

// flagEntry is in the flags of an event if the process enters the container: it is the first one that is seen there, or
// has a parent in another mount namespace, as one of `docker exec`. That parent stays: each further exec is an entry.
const flagEntry = 4

// lookInterval is the time after which an exec stops in a container that is known: stores may have appeared there.
const lookInterval = 2 * time.Second

// The offsets of the fields of event.
const (
	eventStart = 8 * iota
	eventMount
	eventNetns
	eventOwner
	eventName
	eventSize  = eventName + 16
	eventPID   = eventNetns + 4
	eventFlags = eventOwner + 4
)

// fields are the offsets of the kernel's fields that the program reads.
type fields struct {
	nsproxy, fs, threadPID, start  int16 // task_struct
	signal, realParent             int16 // task_struct
	group, session                 int16 // signal_struct
	mountNS, pidNS, netNS          int16 // nsproxy
	pidInum, parent, level, reaper int16 // pid_namespace
	netInum                        int16 // net
	mountID                        int16 // mnt_namespace
	rootDentry                     int16 // fs_struct
	numbers, upidSize              int16 // pid, upid
}

// findFields looks the fields up in the kernel's BTF.
func findFields(spec *btf.Spec) (f fields, err error) {
	var errs []error
	find := func(to *int16, structure string, path ...string) {
		offset, err := offsetOf(spec, structure, path...)
		errs = append(errs, err)
		*to = offset
	}
	find(&f.nsproxy, "task_struct", "nsproxy")
	find(&f.fs, "task_struct", "fs")
	find(&f.threadPID, "task_struct", "thread_pid")
	find(&f.start, "task_struct", "start_boottime")
	find(&f.signal, "task_struct", "signal")
	find(&f.realParent, "task_struct", "real_parent")
	find(&f.group, "signal_struct", "pids")
	f.session = f.group + 3*8 // PIDTYPE_SID
	f.group += 2 * 8          // PIDTYPE_PGID
	find(&f.mountNS, "nsproxy", "mnt_ns")
	find(&f.pidNS, "nsproxy", "pid_ns_for_children")
	find(&f.netNS, "nsproxy", "net_ns")
	find(&f.pidInum, "pid_namespace", "ns", "inum")
	find(&f.parent, "pid_namespace", "parent")
	find(&f.level, "pid_namespace", "level")
	find(&f.reaper, "pid_namespace", "child_reaper")
	find(&f.netInum, "net", "ns", "inum")
	find(&f.rootDentry, "fs_struct", "root", "dentry")
	find(&f.numbers, "pid", "numbers")
	f.upidSize = 16 // struct upid: an int and a pointer
	// Inode numbers of namespaces are used again within seconds. Linux 6.18 has a number for all kinds of namespaces
	// that is not; before, mount namespaces had one of their own.
	if f.mountID, err = offsetOf(spec, "mnt_namespace", "ns", "ns_id"); err != nil {
		find(&f.mountID, "mnt_namespace", "seq")
	}
	return f, errors.Join(errs...)
}

// offsetOf is the offset of a member of a structure, or of a member of that member.
func offsetOf(spec *btf.Spec, structure string, path ...string) (int16, error) {
	var s *btf.Struct
	if err := spec.TypeByName(structure, &s); err != nil {
		return 0, fmt.Errorf("looking up the kernel's struct %s: %w", structure, err)
	}
	offset, members := uint32(0), s.Members
	for _, name := range path {
		member, at, ok := findMember(members, name)
		if !ok {
			return 0, fmt.Errorf("looking up the kernel's struct %s: it has no %s", structure, name)
		}
		offset += at
		members = membersOf(member.Type)
	}
	return int16(offset), nil
}

// findMember finds a member, also in members without a name.
func findMember(members []btf.Member, name string) (found btf.Member, offset uint32, ok bool) {
	for _, m := range members {
		if m.Name == name {
			return m, m.Offset.Bytes(), true
		}
		if m.Name != "" {
			continue
		}
		if found, offset, ok := findMember(membersOf(m.Type), name); ok {
			return found, m.Offset.Bytes() + offset, true
		}
	}
	return found, 0, false
}

func membersOf(t btf.Type) []btf.Member {
	switch t := btf.UnderlyingType(t).(type) {
	case *btf.Struct:
		return t.Members
	case *btf.Union:
		return t.Members
	default:
		return nil
	}
}

// Where the program keeps values on its stack.
const (
	stackMount   = -8  // event.Mount
	stackName    = -24 // the name of the program that was executed
	stackNetns   = -32 // event.Netns, with 4 bytes behind it that are zero
	stackFresh   = -40 // 1 if the mount namespace is new
	stackVerdict = -44 // a value of the map known
	stackNow     = -56 // a value of the map looked
	stackFlags   = -64 // event.Flags, but for flagJob
)

// program is the program at the tracepoint sched_process_exec. In the words of C:
//
//	ns = the PID namespace of the task, or the one above it, ..., whose parent is that of this daemon
//	if (none) return                             // a process of the node
//	first = ns->child_reaper                     // of the pod's own container
//	if (!first || !nets[netns of first]) return
//	if (mount namespace == that of first) return // a process of the pod's own container
//	verdict = known[mount namespace]
//	if (verdict == own) return
//	entry = mount namespace != that of the parent
//	look = verdict == settled && looked[mount namespace] + interval <= now
//	if (verdict == settled && !look && !entry && !updaters[name]) return
//	if (!verdict && root == that of first) return // the pod's own container, too, as with unshare(1)
//	if (!verdict || look) looked[mount namespace] = now
//	record = reserve()
//	if (!record) return                          // never stop a process that the daemon does not know of
//	if (!verdict) known[mount namespace] = settled
//	if (verdict && job of a shell) {             // in its parent's session, and in a process group of its own
//		submit(record with flagJob)
//		return
//	}
//	if (signal(SIGSTOP)) return                  // the task stops before its first instruction
//	submit(record)
//
// PID namespaces tell a container that a container has started, on both versions of cgroups. The first process of one
// tells the pod: nothing need be learned of processes that a daemon before this one has seen. A first process that ends
// has no namespaces any more. The program then reads zeros, as from all pointers that are null.
func program(f fields, m maps, ownPIDNS uint32) asm.Instructions {
	var code asm.Instructions
	add := func(more ...asm.Instruction) { code = append(code, more...) }
	load := func(to, from asm.Register, offset int16) { add(asm.LoadMem(to, from, offset, asm.DWord)) }
	lookup := func(of *ebpf.Map, key int32) {
		add(
			asm.LoadMapPtr(asm.R1, of.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, key),
			asm.FnMapLookupElem.Call(),
		)
	}
	update := func(of *ebpf.Map, key, value int32) {
		add(
			asm.LoadMapPtr(asm.R1, of.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, key),
			asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, value),
			asm.Mov.Imm(asm.R4, int32(ebpf.UpdateAny)),
			asm.FnMapUpdateElem.Call(),
		)
	}

	// R6 is the task, R7 its nsproxy. R8 climbs from its PID namespace to that of the pod's container.
	load(asm.R6, asm.R1, 0)
	load(asm.R7, asm.R6, f.nsproxy)
	load(asm.R8, asm.R7, f.pidNS)
	add(
		asm.LoadMem(asm.R1, asm.R8, f.pidInum, asm.Word),
		asm.LoadImm(asm.R9, int64(ownPIDNS), asm.DWord),
		asm.JEq.Reg(asm.R1, asm.R9, "exit"),
	)
	for range maxLevels {
		load(asm.R2, asm.R8, f.parent)
		add(
			asm.LoadMem(asm.R1, asm.R2, f.pidInum, asm.Word),
			asm.JEq.Reg(asm.R1, asm.R9, "owner"),
			asm.Mov.Reg(asm.R8, asm.R2),
		)
	}
	add(asm.Ja.Label("exit"))

	// R9 is the first process of the pod's container.
	add(asm.LoadMem(asm.R9, asm.R8, f.reaper, asm.DWord).WithSymbol("owner"), asm.JEq.Imm(asm.R9, 0, "exit"))
	load(asm.R1, asm.R9, f.nsproxy)
	load(asm.R1, asm.R1, f.netNS)
	add(
		asm.LoadMem(asm.R1, asm.R1, f.netInum, asm.Word),
		asm.StoreMem(asm.RFP, stackNetns, asm.R1, asm.DWord),
	)
	lookup(m.nets, stackNetns)
	add(asm.JEq.Imm(asm.R0, 0, "exit"))
	load(asm.R1, asm.R7, f.mountNS)
	load(asm.R1, asm.R1, f.mountID)
	load(asm.R2, asm.R9, f.nsproxy)
	load(asm.R2, asm.R2, f.mountNS)
	load(asm.R2, asm.R2, f.mountID)
	add(
		asm.JEq.Reg(asm.R1, asm.R2, "exit"),
		asm.StoreMem(asm.RFP, stackMount, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R1, 0),
		asm.StoreMem(asm.RFP, stackName, asm.R1, asm.DWord),
		asm.StoreMem(asm.RFP, stackName+8, asm.R1, asm.DWord),
		asm.StoreMem(asm.RFP, stackFresh, asm.R1, asm.DWord),
		asm.StoreMem(asm.RFP, stackFlags, asm.R1, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.RFP), asm.Add.Imm(asm.R1, stackName),
		asm.Mov.Imm(asm.R2, 16),
		asm.FnGetCurrentComm.Call(),
		asm.FnKtimeGetNs.Call(),
		asm.StoreMem(asm.RFP, stackNow, asm.R0, asm.DWord),
	)
	load(asm.R1, asm.R6, f.realParent)
	load(asm.R1, asm.R1, f.nsproxy)
	load(asm.R1, asm.R1, f.mountNS)
	load(asm.R1, asm.R1, f.mountID)
	add(
		asm.LoadMem(asm.R2, asm.RFP, stackMount, asm.DWord),
		asm.JEq.Reg(asm.R1, asm.R2, "inside"),
		asm.Mov.Imm(asm.R1, flagEntry),
		asm.StoreMem(asm.RFP, stackFlags, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("inside"),
	)
	lookup(m.known, stackMount)
	add(
		asm.JEq.Imm(asm.R0, 0, "fresh"),
		asm.LoadMem(asm.R1, asm.R0, 0, asm.Word),
		asm.JEq.Imm(asm.R1, int32(knownOwn), "exit"),
		asm.JEq.Imm(asm.R1, int32(knownAside), "stop"),
	)
	lookup(m.looked, stackMount)
	add(
		asm.JEq.Imm(asm.R0, 0, "look"),
		asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
		asm.LoadImm(asm.R2, int64(lookInterval), asm.DWord),
		asm.Add.Reg(asm.R1, asm.R2),
		asm.LoadMem(asm.R2, asm.RFP, stackNow, asm.DWord),
		asm.JLE.Reg(asm.R1, asm.R2, "look"),
	)
	add(
		asm.LoadMem(asm.R1, asm.RFP, stackFlags, asm.DWord),
		asm.JNE.Imm(asm.R1, 0, "stop"),
	)
	lookup(m.updaters, stackName)
	add(asm.JEq.Imm(asm.R0, 0, "exit"), asm.Ja.Label("stop"))

	add(
		asm.LoadMem(asm.R1, asm.RFP, stackFlags, asm.DWord).WithSymbol("look"),
		asm.Or.Imm(asm.R1, flagLook),
		asm.StoreMem(asm.RFP, stackFlags, asm.R1, asm.DWord),
		asm.Ja.Label("looks"),
	)

	add(
		asm.Mov.Imm(asm.R1, 1).WithSymbol("fresh"),
		asm.StoreMem(asm.RFP, stackFresh, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R1, flagEntry),
		asm.StoreMem(asm.RFP, stackFlags, asm.R1, asm.DWord),
	)
	load(asm.R1, asm.R6, f.fs)
	load(asm.R1, asm.R1, f.rootDentry)
	load(asm.R2, asm.R9, f.fs)
	load(asm.R2, asm.R2, f.rootDentry)
	add(asm.JEq.Reg(asm.R1, asm.R2, "exit"))

	add(asm.Mov.Imm(asm.R0, 0).WithSymbol("looks"))
	update(m.looked, stackMount, stackNow)

	add(
		asm.LoadMapPtr(asm.R1, m.events.FD()).WithSymbol("stop"),
		asm.Mov.Imm(asm.R2, eventSize),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnRingbufReserve.Call(),
		asm.JEq.Imm(asm.R0, 0, "exit"),
		asm.Mov.Reg(asm.R9, asm.R0),
	)
	copyFrom := func(to, from int16, size asm.Size) {
		add(asm.LoadMem(asm.R1, asm.RFP, from, size), asm.StoreMem(asm.R9, to, asm.R1, size))
	}
	copyFrom(eventMount, stackMount, asm.DWord)
	copyFrom(eventNetns, stackNetns, asm.Word)
	copyFrom(eventName, stackName, asm.DWord)
	copyFrom(eventName+8, stackName+8, asm.DWord)
	load(asm.R1, asm.R6, f.start)
	add(asm.StoreMem(asm.R9, eventStart, asm.R1, asm.DWord))
	// The numbers of both processes in the PID namespace of this daemon, which is one level above the container's.
	load(asm.R2, asm.R6, f.threadPID)
	load(asm.R3, asm.R8, f.reaper)
	load(asm.R3, asm.R3, f.threadPID)
	add(asm.LoadMem(asm.R4, asm.R8, f.level, asm.Word))
	for level := range m.levels {
		label := fmt.Sprintf("level%d", level)
		at := f.numbers + int16(level)*f.upidSize
		add(
			asm.JNE.Imm(asm.R4, int32(level+1), label),
			asm.LoadMem(asm.R1, asm.R2, at, asm.Word),
			asm.StoreMem(asm.R9, eventPID, asm.R1, asm.Word),
			asm.LoadMem(asm.R1, asm.R3, at, asm.Word),
			asm.StoreMem(asm.R9, eventOwner, asm.R1, asm.Word),
			asm.Ja.Label("signal"),
			asm.Mov.Reg(asm.R5, asm.R9).WithSymbol(label),
		)
	}
	add(asm.Ja.Label("discard"))

	add(
		asm.LoadMem(asm.R1, asm.RFP, stackFlags, asm.DWord).WithSymbol("signal"),
		asm.StoreMem(asm.R9, eventFlags, asm.R1, asm.Word),
		asm.LoadMem(asm.R1, asm.RFP, stackFresh, asm.DWord),
		asm.JEq.Imm(asm.R1, 0, "job"),
		asm.StoreImm(asm.RFP, stackVerdict, int64(knownSettled), asm.Word),
	)
	update(m.known, stackMount, stackVerdict)
	add(
		asm.Ja.Label("send"),
		asm.LoadMem(asm.R1, asm.R6, f.realParent, asm.DWord).WithSymbol("job"),
	)
	load(asm.R1, asm.R1, f.signal)
	load(asm.R2, asm.R6, f.signal)
	load(asm.R3, asm.R1, f.session)
	load(asm.R4, asm.R2, f.session)
	add(asm.JNE.Reg(asm.R3, asm.R4, "send"))
	load(asm.R3, asm.R1, f.group)
	load(asm.R4, asm.R2, f.group)
	add(
		asm.JEq.Reg(asm.R3, asm.R4, "send"),
		asm.LoadMem(asm.R1, asm.RFP, stackFlags, asm.DWord),
		asm.Or.Imm(asm.R1, flagJob),
		asm.StoreMem(asm.R9, eventFlags, asm.R1, asm.Word),
		asm.Ja.Label("submit"),
	)
	add(
		asm.Mov.Imm(asm.R1, int32(unix.SIGSTOP)).WithSymbol("send"),
		asm.FnSendSignal.Call(),
		asm.JNE.Imm(asm.R0, 0, "discard"),
		asm.Mov.Reg(asm.R1, asm.R9).WithSymbol("submit"),
		asm.Mov.Imm(asm.R2, 0),
		asm.FnRingbufSubmit.Call(),
		asm.Ja.Label("exit"),
		asm.Mov.Reg(asm.R1, asm.R9).WithSymbol("discard"),
		asm.Mov.Imm(asm.R2, 0),
		asm.FnRingbufDiscard.Call(),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("exit"),
		asm.Return(),
	)
	return code
}
