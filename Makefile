# What one does with this tree.  Every target that runs something builds .venv first, with all that
# any of them needs; nothing has to be activated.  Needed beforehand: Python 3.10 to 3.13 (with venv
# and headers), gcc, make, and Java 17 for Spark.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV ?= .venv
BIN := $(abspath $(VENV))/bin
# A python that starts, is of a supported version, and has venv and its C headers; 3.11 is what
# everything is tested on.
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	"$$p" -c 'import ensurepip, os, sys, sysconfig, venv; \
	header = sysconfig.get_path("include") + "/Python.h"; \
	sys.exit(not ((3, 10) <= sys.version_info < (3, 14) and os.path.exists(header)))' \
	>/dev/null 2>&1 && command -v "$$p" && break; done)
endif

# Spark starts Python by name: without these two it takes whatever python3 is first on PATH.
export PYSPARK_PYTHON := $(BIN)/python
export PYSPARK_DRIVER_PYTHON := $(BIN)/python
# Not from the current directory: ./kdirect_spark is a source, the installed package is what runs.
export PYTHONSAFEPATH := 1
export PATH := $(BIN):$(PATH)
export SPARK_LOCAL_IP ?= 127.0.0.1
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV SPARK_HOME SPARK_CONF_DIR PYSPARK_SUBMIT_ARGS

SOURCES := $(sort $(shell find python kdirect_spark jvm_shim/src/main -type f \
	\( -name '*.py' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pyi' -o -name '*.h' \
	-o -name '*.json' -o -name py.typed -o -path 'jvm_shim/*' \)))

ARGS ?=
ROWS ?=
JSON ?= bench/out/bench.json
PIN ?= 1
QUICK ?=
COUNT ?=

.PHONY: help
help: ## Name the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2} \
		/^## / {printf "%25s%s\n", "", substr($$0, 4)}' $(firstword $(MAKEFILE_LIST))
	@echo "  Variables: PYTHON, VENV; ARGS for test and demo; ROWS, JSON, PIN, QUICK for bench."

.PHONY: demo
demo: install ## Stream real flights through a broker and Spark, check the result
## (the first run fetches Delta's jars: a minute)
	@echo "demo: a broker, 336,776 flights, one streaming query;" \
		"Spark looks up Delta's jars first (a minute on the first run)"
	@$(BIN)/python demo/run.py $(ARGS)

.PHONY: test
test: install ## Run all tests against the installed package;
## ARGS="-m 'not spark' tests/log" narrows it down
	$(BIN)/pytest --beside $(ARGS)

GUEST := $(BIN)/python tests/guest/run.py

.PHONY: test-rdma
test-rdma: install ## Run the tests over real verbs in soft-RoCE guests
## (Debian packages: docs/rdma.md); ARGS goes to the pytest in the guest
	@$(GUEST) --check
	@status=0; \
	echo "test-rdma: the contract over verbs, then broker and clients, in a guest with soft-RoCE"; \
	KDIRECT_TEST_VERBS=1 $(GUEST) --limit 2700 -- $(BIN)/pytest -p no:cacheprovider \
		-k verbs tests/rdma tests/verbs --ignore tests/verbs/test_spark.py $(ARGS) || status=1; \
	echo "test-rdma: two guests on one network"; \
	KDIRECT_TEST_GUESTS=1 $(BIN)/pytest tests/guest \
		--ignore tests/guest/test_spark_hosts.py || status=1; \
	exit $$status

.PHONY: test-rdma-spark
test-rdma-spark: install ## Run a Spark read in a guest, and an accelerated query on a Spark
## cluster of two of them, over verbs (15 minutes, as no guest runs a JVM fast; 6 GiB)
	@$(GUEST) --check
	KDIRECT_TEST_VERBS=1 $(GUEST) --limit 1200 -- $(BIN)/pytest -p no:cacheprovider \
		tests/verbs/test_spark.py
	KDIRECT_TEST_GUESTS=1 $(BIN)/pytest tests/guest/test_spark_hosts.py $(ARGS)

.PHONY: cluster-proof
cluster-proof: install ## Kill, hang, part and fill brokers in seeded rounds; look for lost records;
## COUNT=500, SEED=n
	KDIRECT_ROUNDS=$(or $(COUNT),500) KDIRECT_SEED="$(SEED)" \
		$(BIN)/pytest tests/members/test_failures.py $(ARGS)

.PHONY: cluster-search
cluster-search: install ## Go through every world of 3 replicas, 3 records and 3 epochs
## (ten minutes); ARGS="--records 2" for less
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.cluster.search \
		--records 3 --epochs 3 --changes 0 --losses 0 $(ARGS)

.PHONY: cluster-schedules
cluster-schedules: install ## Run seeded schedules of replicas, of the rules and with real kernels;
## COUNT=100000, SEED=the first one
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.cluster.simulate --cores \
		--first $(or $(SEED),0) --schedules $(or $(COUNT),100000)
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.replication.run --cores \
		--first $(or $(SEED),0) --schedules $(or $(COUNT),100000)

.PHONY: committed-schedules
committed-schedules: install ## Run seeded schedules of one-sided readers of committed records;
## COUNT=1000 of each case, SEED=the first one
	KDIRECT_SCHEDULES=$(or $(COUNT),1000) KDIRECT_SEED=$(or $(SEED),0) $(BIN)/pytest -q \
		tests/simulation/test_committed.py

.PHONY: pushdown-fuzz
pushdown-fuzz: install ## Push random filters, counts and options down in Spark, and compare the
## rows with those that Spark chooses itself; COUNT=500, SEED=n
	KDIRECT_CONDITIONS=$(or $(COUNT),500) KDIRECT_SEED="$(SEED)" \
		$(BIN)/pytest --timeout 0 tests/spark/test_pushdown_fuzz.py $(ARGS)

.PHONY: group-schedules
group-schedules: install ## Run seeded schedules of consumer groups, by the rules alone;
## COUNT=5000, SEED=the first one
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.broker.group_schedules \
		--first $(or $(SEED),0) --schedules $(or $(COUNT),5000)

.PHONY: api-fuzz
api-fuzz: install ## Send a broker frames of every API that are random, cut, damaged or too
## large, and look whether others are served; COUNT=100000, SEED=n
	KDIRECT_FRAMES=$(or $(COUNT),100000) KDIRECT_SEED="$(SEED)" \
		$(BIN)/pytest -o faulthandler_timeout=0 tests/broker/test_api_fuzz.py $(ARGS)

.PHONY: commit-schedules
commit-schedules: install ## Run seeded schedules of offset commits by WRITEs;
## COUNT=5000, SEED=n
	KDIRECT_SCHEDULES=$(or $(COUNT),5000) KDIRECT_SEED="$(SEED)" \
		$(BIN)/pytest --timeout 0 tests/simulation/test_commits.py $(ARGS)

.PHONY: slash-schedules
slash-schedules: install ## Run seeded schedules of a job of the state engine;
## COUNT=20000, SEED=the first one
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.state.simulate --cores \
		--first $(or $(SEED),0) --schedules $(or $(COUNT),20000)
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.state.simulate_planned --cores \
		--first $(or $(SEED),0) --schedules $(or $(COUNT),20000)

.PHONY: slash-jobs
slash-jobs: install ## Run jobs of a family of plans and inputs over a broker, and a quarter
## as many that are killed; COUNT=200, SEED=0
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.state.whole_jobs \
		--first $(or $(SEED),0) --examples $(or $(COUNT),200)
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.state.killed_jobs \
		--first $(or $(SEED),0) --examples $$(( ($(or $(COUNT),200) + 3) / 4 ))

.PHONY: slash-queries
slash-queries: install ## Accelerate a family of PySpark queries and inputs, and compare their rows
## with Spark's own; COUNT=200, SEED=0
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.spark.slash_family \
		--first $(or $(SEED),0) --examples $(or $(COUNT),200)

.PHONY: slash-kills
slash-kills: install ## Kill drivers, workers, planners and brokers under accelerated queries,
## beside Spark's batch SQL (seven seconds each); COUNT=300, SEED=the first one
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.spark.slash_kills --keep-going \
		--first $(or $(SEED),0) --count $(or $(COUNT),300)

.PHONY: sink-kills
sink-kills: install ## Kill tasks, commits, drivers and brokers under streams into the exactly-once
## sink, and look what a stock client sees; COUNT=300 kills, SEED=the first one
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.spark.sink_kills --keep-going \
		--first $(or $(SEED),0) --count $$(( ($(or $(COUNT),300) + 2) / 3 ))

.PHONY: txn-histories
txn-histories: install ## Run seeded histories of transactions in one log, beside a plain model;
## COUNT=2000, SEED=the first one
	PYTHONSAFEPATH=1 KDIRECT_ROUNDS=$(or $(COUNT),2000) KDIRECT_SEED=$(or $(SEED),0) \
		$(BIN)/pytest -q tests/log/test_transactions.py -k histories $(ARGS)

.PHONY: txn-schedules
txn-schedules: install ## Run seeded schedules of transactions and their coordinator;
## COUNT=schedules, SEED=first
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.broker.transaction_schedules --cores \
		--first $(or $(SEED),0) --schedules $(or $(COUNT),20000)

.PHONY: exactly-once-schedules
exactly-once-schedules: install ## Run seeded schedules of batches that are written exactly once;
## COUNT=schedules, SEED=first
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.broker.attempt_schedules --cores \
		--first $(or $(SEED),0) --schedules $(or $(COUNT),20000)

.PHONY: exactly-once-kills
exactly-once-kills: install ## Kill the broker while drivers write batches exactly once, or leave
## (ten seconds each); COUNT=200, SEED=the first one
	PYTHONSAFEPATH=1 KDIRECT_ROUNDS=$(or $(COUNT),200) KDIRECT_SEED=$(or $(SEED),0) \
		$(BIN)/pytest tests/client/test_exactly_once_kills.py -k killed $(ARGS)

.PHONY: txn-kills
txn-kills: install ## Kill the broker and a client that consumes, transforms and produces in
## transactions (five seconds each); COUNT=200, SEED=the first one
	PYTHONSAFEPATH=1 KDIRECT_ROUNDS=$(or $(COUNT),200) KDIRECT_SEED=$(or $(SEED),0) \
		$(BIN)/pytest tests/client/test_txn_kills.py $(ARGS)

.PHONY: producer-kills
producer-kills: install ## Kill the broker and our own clients in the middle of transactions
## (eight seconds each); COUNT=200, SEED=the first one
	PYTHONSAFEPATH=1 KDIRECT_ROUNDS=$(or $(COUNT),200) KDIRECT_SEED=$(or $(SEED),0) \
		$(BIN)/pytest tests/client/test_producer_kills.py $(ARGS)

.PHONY: txn-leader-kills
txn-leader-kills: install ## Kill the leader in the middle of a transaction over RDMA,
## of three brokers (ten seconds each); COUNT=50, SEED=the first one
	PYTHONSAFEPATH=1 KDIRECT_ROUNDS=$(or $(COUNT),50) KDIRECT_SEED=$(or $(SEED),0) \
		$(BIN)/pytest tests/members/test_transaction_leader_kills.py $(ARGS)

.PHONY: tier-schedules
tier-schedules: install ## Run seeded schedules of a tiered partition: copies, deaths, retention;
## COUNT=20000, SEED=the first one
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.storage.schedules \
		--first $(or $(SEED),0) --schedules $(or $(COUNT),20000)

.PHONY: tier-driver-schedules
tier-driver-schedules: install ## The same of copiers, deletions and logs as they are, over a store
## that fails (a tenth of a second each); COUNT=2000, SEED=the first one
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.storage.driver_schedules \
		--first $(or $(SEED),0) --schedules $(or $(COUNT),2000)

.PHONY: tier-kills
tier-kills: install ## Kill a broker at each step of copying and deletion (two seconds each);
## COUNT=200, SEED=the first one
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.storage.remote_kills \
		--first $(or $(SEED),0) --count $(or $(COUNT),200)

.PHONY: cluster-tier-kills
cluster-tier-kills: install ## The same of leaders in a cluster (ten seconds each);
## COUNT=100, SEED=the first one
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.members.tiered_kills \
		--first $(or $(SEED),0) --count $(or $(COUNT),100)

.PHONY: slash-laws
slash-laws: install ## Test the laws of the delta protocol, with every kind of state, on many
## examples a plan and law; COUNT=1000, SEED=0
	KDIRECT_EXAMPLES=$(or $(COUNT),1000) $(BIN)/pytest -p no:cacheprovider \
		--hypothesis-seed=$(or $(SEED),0) tests/state/test_delta_laws.py $(ARGS)

SANITIZED := build/sanitized
SANITIZERS := address,undefined

.PHONY: parity
parity: install ## Run the scenarios of Spark's Kafka suites with format("kafka") and
## format("kdirect") against one broker, and write their differences into docs/spark.md
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.parity.run $(if $(ARGS),$(ARGS),--write)

.PHONY: slash-plans
slash-plans: install ## Make the analyzed plans of tests/slash again, from this Spark
	$(BIN)/python tests/slash/make_plans.py

.PHONY: sanitize
sanitize: install ## Run the tests of the state engine's kernels with gcc's sanitizers
## for addresses and undefined behaviour (about ten minutes)
	@mkdir -p $(SANITIZED)
	cp -r "$$($(BIN)/python -c 'import kdirect; print(*kdirect.__path__)')" $(SANITIZED)
	KDIRECT_EXT=kdirect.state,kdirect.format.fixed CFLAGS="-fsanitize=$(SANITIZERS) -g" \
		$(BIN)/python setup.py -q build_ext --force --build-lib $(SANITIZED) \
		--build-temp $(SANITIZED)/objects
	grep -q __asan_ $(SANITIZED)/kdirect/state/table.*.so # not the copies that were there before
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
		UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONPATH=$(SANITIZED) \
		$(BIN)/pytest -p no:cacheprovider --capture=sys $(ARGS) tests/format/test_fixed.py $(addprefix \
		tests/state/test_,$(addsuffix .py,arena backend chains collisions fragments half_done \
		keys sessions snapshots table texts))

.PHONY: check
check: install ## Lint, formatting, types, import rules, tidiness; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=$(CURDIR)/python:$(CURDIR) $(BIN)/lint-imports
	$(BIN)/pytest -q -p no:cacheprovider --durations=1 tests/tidy

.PHONY: fix
fix: install layout docs ## Repair what check complains of, as far as tools can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: layout
layout: ## Write the layout.pxd of each room from its layout.py
	$(BIN)/python python/kdirect/layout_pxd.py

.PHONY: docs
docs: install ## Write docs/options.md, docs/metrics.md and docs/errors.md
## from the tables in the code
	PYTHONPATH=$(CURDIR)/python $(BIN)/python -m kdirect.docs docs

.PHONY: bench
bench: install ## Measure: ROWS="codec-decode slot-poll" JSON=out.json (none: all rows);
## PIN=0 leaves the cores to the scheduler
	$(BIN)/python bench/run.py --rows "$(ROWS)" --json "$(JSON)" \
		$(if $(filter 0,$(PIN)),--no-pin) $(if $(QUICK),--quick)

.PHONY: bench-compare
bench-compare: JSON := bench/out/compare.json
bench-compare: install ## Measure in turns with another installed checkout: BEFORE=its root;
## ROWS, JSON as bench; ROUNDS=3, SECONDS=10
	$(BIN)/python bench/compare.py --before "$(BEFORE)" --rows "$(ROWS)" --json "$(JSON)" \
		--rounds $(or $(ROUNDS),3) --seconds $(or $(SECONDS),10)

.PHONY: bench-vs-kafka
bench-vs-kafka: install ## Measure beside Apache Kafka and Spark's Kafka connector
## (jars from Maven Central); ROWS, JSON, QUICK as bench, COUNT for failover; writes a report too
	$(BIN)/python bench/vs_kafka.py --rows "$(ROWS)" --json "$(JSON)" $(if $(QUICK),--quick) \
		$(if $(COUNT),--count "$(COUNT)")

.PHONY: versus-kafka
versus-kafka: install ## Make the same requests to Apache Kafka and to kdirect, compare the answers,
## and write the table of differences into docs/broker.md (half a minute)
	$(BIN)/python bench/versus/answers.py $(ARGS)

.PHONY: slash-model
slash-model: install ## Print the paper's figure 9 from the costs of one core of this machine:
## a model, no measurement; COSTS=a file of its --write
	@$(BIN)/python bench/slash_model.py $(if $(COSTS),--costs "$(COSTS)")

.PHONY: bench-cluster
bench-cluster: install ## Measure three brokers with PARTITIONS=1000 of factor 3:
## until they are made, written to, led again after a kill; what the processes hold
	$(BIN)/python -m bench.many_partitions --partitions $(or $(PARTITIONS),1000)

.PHONY: bench-list
bench-list: ## Name the rows of bench, bench-vs-kafka and bench-rdma
	@$(PYTHON) bench/run.py --list
	@$(PYTHON) bench/vs_kafka.py --list
	@$(PYTHON) bench/verbs.py --list

.PHONY: bench-rdma
bench-rdma: JSON := bench/out/rdma.json
bench-rdma: install ## Measure READs and channels over verbs beside perftest's, in a guest;
## JSON, QUICK as bench
	@$(GUEST) --check
	$(GUEST) --limit 600 --share bench/out -- \
		$(BIN)/python bench/verbs.py --json bench/out/rdma.json --no-pin $(if $(QUICK),--quick)
	@test "$(JSON)" -ef bench/out/rdma.json || cp bench/out/rdma.json "$(JSON)"

.PHONY: build
build: install ## Put a wheel and a source distribution into dist/
	$(BIN)/python -c \
		"from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
	@ls -l dist

.PHONY: install
install: $(VENV)/.installed ## Create .venv, or bring it up to date with the sources

PIP := $(BIN)/python -m pip --disable-pip-version-check install

# Every exact version that pyproject.toml names.  Without it pip downloads the newest PySpark that
# kdirect admits before it looks at what the other packages admit.
$(VENV)/constraints.txt: pyproject.toml
	@mkdir -p $(VENV)
	@grep -oE '"[A-Za-z0-9._-]+==[^"]+"' $< | tr -d '"' | sort -u > $@

# The list of sources, rewritten only when a file comes or goes.
$(VENV)/.sources: FORCE
	@mkdir -p $(VENV)
	@echo $(SOURCES) | cmp -s - $@ || echo $(SOURCES) > $@

# Dependencies when pyproject.toml changed, else the package alone; build/ keeps compiled modules
# between the two.  The package is built first, and with the Cython that stays: each module depends
# on Cython's own files, so a Cython that is installed later would have all compiled once more.
$(VENV)/.installed: $(VENV)/.sources $(SOURCES) setup.py pyproject.toml $(VENV)/constraints.txt
	@test -x $(BIN)/python || $(MAKE) -s --no-print-directory python > /dev/null
	@test -x $(BIN)/python || { echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@if [ -f $(VENV)/.dependencies ] && ! [ pyproject.toml -nt $(VENV)/.dependencies ]; then \
		echo "sources changed: building kdirect into $(VENV)"; \
		$(PIP) -q --no-deps --no-build-isolation --force-reinstall .; \
	else \
		echo "installing kdirect and what it is tested with into $(VENV)" \
			"(the first time this fetches about 500 MB, mostly Spark)"; \
		$(PIP) -q -c $(VENV)/constraints.txt 'setuptools>=77' cython; \
		rm -rf $(VENV)/wheel; \
		$(PIP:install=wheel) -q --no-deps --no-build-isolation -w $(VENV)/wheel .; \
		$(PIP) -c $(VENV)/constraints.txt \
			"$$(echo $(VENV)/wheel/kdirect-*.whl)[spark,delta,dev,bench]"; \
		$(PIP) -q --no-deps --force-reinstall $(VENV)/wheel/kdirect-*.whl; \
		rm -r $(VENV)/wheel; \
		touch $(VENV)/.dependencies; \
	fi
	@echo "compiling the JVM shim for this Spark, unless it is there:" \
		"$$($(BIN)/python -m kdirect_spark.shim 2>&1 || true)"
	@touch $@

.PHONY: jar
jar: install ## Put the jar with shim and Python packages into dist/, for spark-submit --jars, and
## into dist/maven, for --packages; ADD="jars of other Pythons or platforms"
	@$(BIN)/python -m kdirect_spark.one_jar --output dist --repository dist/maven \
		$(if $(ADD),--add $(ADD))

.PHONY: sbt
sbt: install ## Run sbt, which is fetched, for build.sbt; ARGS="test package"
	@$(BIN)/python jvm_shim/sbt.py $(or $(ARGS),test package)

.PHONY: spark-versions
spark-versions: install ## Run the jar on versions of Spark (460 MB each, kept in the cache);
## SPARKS="4.1.0 4.3.0"
	KDIRECT_SPARKS="$(or $(SPARKS),4.1.0 4.1.4 4.2.1 4.3.0)" $(BIN)/pytest \
		tests/packaging/test_jar_in_spark.py -k versions $(ARGS)

.PHONY: clean
clean: ## Remove what builds and runs leave behind, but for .venv
	rm -rf build dist bench/out spark-warehouse metastore_db derby.log .pytest_cache .hypothesis \
		.mypy_cache .ruff_cache .import_linter_cache
	find . -path ./$(VENV) -prune -o -type d \( -name __pycache__ -o -name '*.egg-info' \) -print0 \
		| xargs -0 rm -rf
	find python -name '*.so' -delete -o -name '*.pyx' -print | sed -n 's/\.pyx$$/.c/p' | xargs rm -f

.PHONY: distclean
distclean: clean ## Remove .venv too
	rm -rf $(VENV)

.PHONY: python
python: ## Say which Python the environment is made with
	@test -n "$(PYTHON)" || { echo "make: no Python 3.10-3.13 with venv and headers found;" \
		"install python3.11-venv and python3.11-dev, or name one:" \
		"make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "$(PYTHON)"

.PHONY: FORCE
FORCE:
