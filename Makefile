MODULE  := github.com/sluice-cni/sluice
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X main.gitVersion=$(VERSION)
FUZZTIME ?= 20s

# The version comes from LDFLAGS; a clone that belongs to somebody else builds too.
export GOFLAGS := $(GOFLAGS) -buildvcs=false

SCRIPTS := .ci/run $(shell find . -path ./bin -prune -o -name '*.sh' -print)
GODIRS  := plugin daemon integration

SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help build test fuzz bench lint manifests demo e2e bench-e2e e2e-kind cluster-up cluster-down drill screenshot clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## Build bin/sluice and bin/sluiced, static and stripped
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/sluice ./plugin
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/sluiced ./daemon

test: build ## Install what the tests need, then run all of them under the race detector
	integration/setup.sh test
	CGO_ENABLED=1 go test -race -timeout 20m ./...

fuzz: ## Run each fuzz target for FUZZTIME (20s)
	@set -e; for file in $$(grep -rl --include='*_test.go' '^func Fuzz' $(GODIRS)); do \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' $$file); do \
			echo "$$target in $$(dirname $$file)"; \
			go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) ./$$(dirname $$file); \
		done; \
	done

bench: build ## Measure, against the budgets; writes bin/bench.json
	integration/setup.sh bench
	go run ./integration/bench

lint: bin/tools/golangci-lint bin/tools/helm ## Check the Go code, the scripts, and what the plugin links
	@integration/setup.sh lint
	shellcheck $(SCRIPTS)
	@unformatted=$$(gofmt -l $(GODIRS)) && if [ -n "$$unformatted" ]; then echo "gofmt -w" $$unformatted; exit 1; fi
	go vet ./...
	go mod tidy -diff
	@deps=$$(go list -deps ./plugin) && \
		if echo "$$deps" | grep -E '^(([a-z]+\.)?k8s\.io|github\.com/prometheus|$(MODULE)/daemon)(/|$$)'; then \
			echo "the plugin links what it must not"; exit 1; \
		fi
	@for of in sluice:plugin sluiced:daemon; do \
		linked=$$(go list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}}{{end}}{{end}}' ./$${of#*:}) && \
		named=$$(awk -v of="$${of%:*}" '/^[^ ]/ { on = $$1 == of && $$2 ~ /^\(/ } on && /^  / { print $$1 }' NOTICE) && \
		diff <(sort -u <<<"$$linked") <(sort -u <<<"$$named") || \
			{ echo "NOTICE does not name the modules that $${of%:*} links (<), or others (>)"; exit 1; }; \
	done
	bin/tools/golangci-lint run ./...
	bin/tools/helm lint --quiet deploy/chart
	@deploy/mitmproxy/render.sh | diff deploy/mitmproxy/mitmproxy.yaml - || { echo "deploy/mitmproxy/mitmproxy.yaml is not current: make manifests"; exit 1; }
	@deploy/render.sh | diff deploy/sluice.yaml - || { echo "deploy/sluice.yaml is not what the chart makes: make manifests"; exit 1; }
	cd integration/cluster && go vet ./... && go mod tidy -diff && ../../bin/tools/golangci-lint run ./...

manifests: bin/tools/helm ## Render deploy/sluice.yaml from the chart, and the example mitmproxy with its addon
	deploy/render.sh > deploy/sluice.yaml
	deploy/mitmproxy/render.sh > deploy/mitmproxy/mitmproxy.yaml

demo: ## See it work: as root, in under a minute once it is built
	@integration/demo.sh

e2e: cluster-up bin/tools/helm ## Run the end-to-end tests on a Kubernetes node that is brought up here, and take it down
	trap '$(MAKE) -C $(CURDIR) cluster-down' EXIT; cd integration/cluster && \
		KUBECONFIG=$(CURDIR)/bin/cluster/node/kubeconfig E2E_ON_NODE='$(CURDIR)/bin/cluster/cluster exec -- sh -c' \
			go test -count=1 ./e2e && go test -count=1 $$(go list ./... | grep -v /e2e$$)

bench-e2e: cluster-up ## Measure on that node, against the budgets
	trap '$(MAKE) -C $(CURDIR) cluster-down' EXIT; cd integration/cluster && \
		KUBECONFIG=$(CURDIR)/bin/cluster/node/kubeconfig go test -count=1 -run '^$$' -bench . -benchtime 1x -timeout 30m ./e2e

e2e-kind: build bin/cluster/cluster bin/tools/helm ## Run the same tests on kind, where Docker is
	integration/cluster/kind.sh

cluster-up: build bin/cluster/cluster ## Bring a Kubernetes node up here, as root, with images of sluice and mitmproxy
	integration/setup.sh e2e
	bin/cluster/cluster up --dual-stack
	bin/cluster/cluster image sluice bin/sluice bin/sluiced | bin/cluster/cluster load
	bin/cluster/cluster image mitmproxy | bin/cluster/cluster load
	bin/cluster/cluster image tools | bin/cluster/cluster load

cluster-down: bin/cluster/cluster ## Take that node down; nothing of it stays
	bin/cluster/cluster down

drill: ## Let things go wrong under load, over and over, and print what became of the connections
	integration/setup.sh test
	go test -count=1 -timeout=30m -run TestDrills -v ./integration -args -drill

screenshot: ## Take the picture of mitmweb in docs, in a real browser
	integration/setup.sh screenshot
	go test -count=1 -run TestScreenshot ./integration -args -screenshot $(CURDIR)/docs/mitmweb.png

clean: ## Remove what was built
	if [ -x bin/cluster/cluster ]; then bin/cluster/cluster down; fi
	rm -rf bin

# Development tools, in the versions of tools/go.mod.
bin/tools/golangci-lint: tools/go.mod tools/go.sum
	go build -C tools -o ../$@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

bin/tools/helm: tools/helm/go.mod tools/helm/go.sum
	go build -C tools/helm -o ../../$@ helm.sh/helm/v3/cmd/helm

bin/tools/cnitool: tools/go.mod tools/go.sum
	go build -C tools -o ../$@ github.com/containernetworking/cni/cnitool

.PHONY: bin/cluster/cluster
bin/cluster/cluster:
	go build -C integration/cluster -o ../../$@ .

.PHONY: bin/connectproxy
bin/connectproxy:
	go build -o $@ ./integration/connectproxy
