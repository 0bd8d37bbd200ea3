package oci

import (
	"slices"

	"github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
)

const path = "PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// capabilities are those that containers have by default.
var capabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// newSpec returns the configuration that runtimes give to containers, as far as it matters here.
func newSpec(image Image, args []string) *specs.Spec {
	return &specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Args: args, Cwd: "/", Env: append([]string{path, "HOME=/tmp", "LC_ALL=C.UTF-8"}, image.Env...),
			Capabilities: &specs.LinuxCapabilities{
				Bounding: capabilities, Effective: capabilities, Permitted: capabilities,
			},
		},
		Root: &specs.Root{Path: "rootfs"},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "nodev", "mode=1777"}},
			{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=1777"}},
		},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{
			{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace},
			{Type: specs.UTSNamespace},
		}},
	}
}

// Adjust makes the additions of an NRI plugin.
func (c *Container) Adjust(a *api.ContainerAdjustment) {
	for _, e := range a.GetEnv() {
		c.Spec.Process.Env = append(c.Spec.Process.Env, e.ToOCI())
	}
	for _, m := range a.GetMounts() {
		c.Spec.Mounts = append(c.Spec.Mounts, m.ToOCI(nil))
	}
	for _, h := range a.GetHooks().GetCreateContainer() {
		if c.Spec.Hooks == nil {
			c.Spec.Hooks = &specs.Hooks{}
		}
		c.Spec.Hooks.CreateContainer = append(c.Spec.Hooks.CreateContainer, h.ToOCI())
	}
}

// SetUser makes the container's processes run as an unprivileged user.
func (c *Container) SetUser(id uint32) {
	c.Spec.Process.User = specs.User{UID: id, GID: id}
	c.Spec.Process.Capabilities = &specs.LinuxCapabilities{}
}

// SetPrivileged lets the container run a Docker: with more capabilities, all devices, and the machine's cgroups.
func (c *Container) SetPrivileged() {
	all := append(slices.Clone(capabilities), "CAP_NET_ADMIN", "CAP_SYS_ADMIN", "CAP_SYS_PTRACE")
	c.Spec.Process.Capabilities = &specs.LinuxCapabilities{Bounding: all, Effective: all, Permitted: all}
	c.Spec.Linux.Resources = &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}}
	c.Spec.Mounts = append(c.Spec.Mounts,
		specs.Mount{Destination: "/sys", Type: "sysfs", Source: "sysfs"},
		specs.Mount{Destination: "/run", Type: "tmpfs", Source: "tmpfs"},
		specs.Mount{Destination: "/sys/fs/cgroup", Type: "bind", Source: "/sys/fs/cgroup", Options: []string{"rbind"}},
	)
}

// JoinNetwork puts the container into the netns at a path.
func (c *Container) JoinNetwork(path string) {
	network := specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: path}
	c.Spec.Linux.Namespaces = append(c.Spec.Linux.Namespaces, network)
}
