MODULE  := github.com/sluice-cni/sluice
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X main.gitVersion=$(VERSION)
FUZZTIME ?= 20s
FUZZRULESTIME ?= 1h
# The last release of each version of mitmproxy, of each minor one of 12, and the development branch.
VERSIONS ?= 8.1.1 9.0.1 10.4.2 11.1.3 12.0.1 12.1.2 12.2.3 12.3.1 main
IMAGES := debian12 debian13 alpine rhel distroless bare busybox

# LDFLAGS sets the version. Go itself must not ask git for it: git refuses to read a clone that another user owns.
export GOFLAGS := $(GOFLAGS) -buildvcs=false

SCRIPTS := .ci/run $(wildcard tools/lint/*) $(shell find . -path ./bin -prune -o -name '*.sh' -print)
GODIRS  := plugin daemon integration

SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help build test test-mitmproxy trust-table nested-table fuzz fuzz-rules bench lint manifests demo e2e \
	bench-e2e e2e-kind cluster-up cluster-down drill screenshot clean

help: ## List the targets
	@echo "Targets (those with * need root, on Debian or Ubuntu; they install the packages that they need):"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## Build bin/sluice (the CNI plugin) and bin/sluiced (the daemon), static and stripped
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/sluice ./plugin
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/sluiced ./daemon

test: build ## * Run the unit and integration tests under the race detector
	integration/setup.sh test
	@# By default a program with the race detector sleeps for a second at its end, and there are 25 packages of tests.
	CGO_ENABLED=1 GORACE=atexit_sleep_ms=100 go test -race -timeout 20m ./...

test-mitmproxy: ## * Test protocols and failures with VERSIONS of mitmproxy; write bin/mitmproxy/table.md
	integration/setup.sh test-mitmproxy
	integration/mitmproxy.sh install $(VERSIONS)
	@# The development branch is missing where GitHub cannot be reached.
	had=$$(for v in $(VERSIONS); do if [[ -x bin/mitmproxy/$$v/mitmdump ]]; then echo "$$v"; fi; done); \
	go test -count=1 -timeout 60m -parallel 4 -run '^TestVersions$$' ./integration/mitmproxy \
		-args -versions "$$had" -table $(CURDIR)/bin/mitmproxy/table.md; \
	status=$$?; cat bin/mitmproxy/table.md; exit $$status

trust-table: build ## * Test which clients of which images trust the proxy's CA; write bin/images/table.md
	integration/setup.sh trust-table
	integration/images.sh install $(IMAGES)
	@# The test binary is a client in each image, and so has to be static.
	CGO_ENABLED=0 SLUICE_TEST_BINARIES=$(CURDIR)/bin \
	go test -count=1 -timeout 60m -run '^TestTable$$' ./integration/truststore \
		-args -table $(CURDIR)/bin/images/table.md; \
	status=$$?; cat bin/images/table.md; exit $$status

nested-table: build bin/tools/buildkitd ## * Test clients in containers of Docker; write bin/images/nested.md
	integration/setup.sh trust-table
	integration/images.sh install debian12 debian13 alpine rhel distroless busybox updates
	go test -count=1 -v -timeout 180m -run '^(TestBusyMachine|TestUpdates|TestTable)$$' ./integration/nested \
		-args -table $(CURDIR)/bin/images/nested.md; \
	status=$$?; cat bin/images/nested.md; exit $$status

fuzz: ## Run each fuzz target for FUZZTIME (default 20s)
	@set -e; for file in $$(grep -rl --include='*_test.go' '^func Fuzz' $(GODIRS)); do \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' $$file); do \
			echo "$$target in $$(dirname $$file)"; \
			go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) ./$$(dirname $$file); \
		done; \
	done

fuzz-rules: ## * Try for FUZZRULESTIME (default 1h) to get TCP out of captured pods; take all rules away one by one
	integration/setup.sh test
	CGO_ENABLED=1 go test -race -count=1 -v -timeout 0 ./integration/escape \
		-args -escape.duration=$(FUZZRULESTIME) -escape.seed=$$(date +%s) -escape.every

bench: build ## * Measure latency, throughput, ADD and memory against their budgets; write bin/bench.json
	integration/setup.sh bench
	integration/images.sh install debian13
	go run ./integration/bench

# The quick checks come first. Each script begins with a comment about its check, and its message says how to fix a
# finding.
lint: bin/tools/golangci-lint bin/tools/helm ## Check Go, Python, scripts, wording, NOTICE, links, chart and manifests
	@integration/setup.sh lint
	tools/lint/go-format
	tools/lint/columns
	tools/lint/plain-words
	shellcheck $(SCRIPTS)
	bin/tools/helm lint --quiet deploy/chart
	tools/lint/manifests
	tools/lint/values
	tools/lint/policies
	tools/lint/python
	go mod tidy -diff
	tools/lint/plugin-links
	tools/lint/notice
	go vet ./...
	bin/tools/golangci-lint run ./...
	for module in cluster writers; do (cd integration/$$module && go mod tidy -diff && go vet ./... && \
		../../bin/tools/golangci-lint run ./...) || exit; done

manifests: bin/tools/helm ## Render deploy/sluice.yaml and deploy/mitmproxy/mitmproxy.yaml from their sources
	deploy/render.sh > deploy/sluice.yaml
	deploy/mitmproxy/render.sh > deploy/mitmproxy/mitmproxy.yaml

demo: ## * Show in under a minute that a pod's connections wait for a late proxy, and HTTPS, in network namespaces
	@integration/demo.sh

e2e: cluster-up bin/tools/helm ## * Run the end-to-end tests on a Kubernetes node on this machine, then remove the node
	trap '$(MAKE) -C $(CURDIR) cluster-down' EXIT; cd integration/cluster && \
		KUBECONFIG=$(CURDIR)/bin/cluster/node/kubeconfig E2E_ON_NODE='$(CURDIR)/bin/cluster/cluster exec -- sh -c' \
			go test -count=1 -timeout 45m ./e2e && go test -count=1 $$(go list ./... | grep -v /e2e$$)

bench-e2e: cluster-up ## * Measure pod starts and a full node on such a node against their budgets
	trap '$(MAKE) -C $(CURDIR) cluster-down' EXIT; cd integration/cluster && \
		KUBECONFIG=$(CURDIR)/bin/cluster/node/kubeconfig \
			go test -count=1 -run '^$$' -bench . -benchtime 1x -timeout 30m ./e2e

e2e-kind: build bin/cluster/cluster bin/tools/helm bin/tools/kind ## Run them on kind, and netns tests inside a node
	integration/cluster/kind.sh

cluster-up: build bin/cluster/cluster ## * Start a Kubernetes node on this machine, with images of sluice and mitmproxy
	integration/setup.sh e2e
	bin/cluster/cluster up --dual-stack
	bin/cluster/cluster image sluice bin/sluice bin/sluiced | bin/cluster/cluster load
	bin/cluster/cluster image mitmproxy bin/mitmproxy/12.3.1 | bin/cluster/cluster load
	bin/cluster/cluster image tools | bin/cluster/cluster load

cluster-down: bin/cluster/cluster ## * Stop that node and remove all its files
	bin/cluster/cluster down

drill: SEED ?= $(shell date +%s)
drill: ## * Break daemon, proxy and pods under load, and report the fate of every connection; FAULTS=1000: at random
	integration/setup.sh test
ifdef FAULTS
	go test -count=1 -timeout=0 -run '^TestRandomFaults$$' -v ./integration/drill \
		-args -drill -drill-faults=$(FAULTS) -drill-seed=$(SEED)
else
	go test -count=1 -timeout=1h -run '^TestDrills$$' -v ./integration/drill -args -drill -drill-seed=$(SEED)
endif

screenshot: ## * Take the screenshot of mitmweb for docs/ in a real browser
	integration/setup.sh screenshot
	go test -count=1 -run TestScreenshot ./integration/mitmproxy -args -screenshot $(CURDIR)/docs/mitmweb.png

clean: ## Remove bin/, and the Kubernetes node if one runs
	if [ -x bin/cluster/cluster ]; then bin/cluster/cluster down; fi
	rm -rf bin

# Development tools, in the versions that the go.mod files in tools/ name.
bin/tools/golangci-lint: tools/go.mod tools/go.sum
	go build -C tools -o ../$@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

bin/tools/helm: tools/helm/go.mod tools/helm/go.sum
	go build -C tools/helm -o ../../$@ helm.sh/helm/v3/cmd/helm

bin/tools/kind: tools/kind/go.mod tools/kind/go.sum
	go build -C tools/kind -o ../../$@ sigs.k8s.io/kind

# The etcd of a kind node whose image is made on this machine.
bin/tools/etcd: tools/kind/go.mod tools/kind/go.sum
	CGO_ENABLED=0 go build -C tools/kind -o ../../$@ go.etcd.io/etcd/server/v3

bin/tools/buildkitd bin/tools/buildctl &: tools/buildkit/go.mod tools/buildkit/go.sum
	go build -C tools/buildkit -o ../../bin/tools/ tool

bin/tools/cnitool: tools/go.mod tools/go.sum
	go build -C tools -o ../$@ github.com/containernetworking/cni/cnitool

.PHONY: bin/cluster/cluster
bin/cluster/cluster:
	go build -C integration/cluster -o ../../$@ .

.PHONY: bin/connectproxy
bin/connectproxy:
	go build -o $@ ./integration/connectproxy
