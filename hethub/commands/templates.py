"""The commented files that `hethub init` writes."""

LAPTOP_MODEL = """# A Llama small enough for CPU cores: 3 M parameters.
name: llama-tiny
layers: 8
hidden: 192
heads: 8
kv_heads: 4
ffn: 432
vocab: 272            # bytes
max_seq_len: 256
"""

PRETRAIN_MODEL = """# Llama 3 8B. Any Llama: `hethub schema model` lists the keys; hf:FOLDER in the job takes weights too.
name: llama3-8b
layers: 32
hidden: 4096
heads: 32
kv_heads: 8
ffn: 14336
vocab: 128256         # at least as many as the tokenizer has
max_seq_len: 8192
rope_theta: 500000.0
"""

LAPTOP_JOB = """# A small Llama over two emulated vendors on this machine.
#   hethub plan job.yaml       what it would take, without running anything
#   hethub launch job.yaml     train it on the {ranks} ranks of cluster.yaml; Ctrl-C saves, and says how to go on
# The same by hand: mpirun -n {ranks} --oversubscribe --bind-to none --continuous hethub train job.yaml
#               or: torchrun --nproc-per-node {ranks} -m hethub train job.yaml
model: model.yaml
cluster: cluster.yaml
data: {{source: python-stdlib}}   # the running Python's own source; your text, a key `text` in every line:
# data: {{source: jsonl, path: mine.jsonl}}                     # or {{source: text, path: FOLDER}}
# eval: {{every_steps: 20, batches: 2, data: {{source: jsonl, path: held-out.jsonl}}}}   # loss on other text
train:
  steps: 60
  global_batch: 16              # sequences a step
  seq_len: 128                  # tokens each
  precision: fp32
  lr: 3.0e-3
  min_lr: 3.0e-4                # where the rate ends
  warmup_steps: 10
plan: auto                      # what each rank does is found; or a plan file
measure: always                 # ranks measure themselves first: the catalogue's speed of a CPU core is a guess
checkpoint: {{every_steps: 20, keep: 2}}
"""

_DEVICES = """train:
  steps: {steps}
  global_batch: {batch}             # sequences a step
  seq_len: {seq_len}                # tokens each
  precision: bf16               # weights are kept in fp32 beside it
  lr: {lr}
  min_lr: {min_lr}                # where the rate ends
  warmup_steps: {warmup}
plan: auto                      # what each accelerator does is found; or a plan file
checkpoint: {{every_steps: 500, keep: 2}}
"""

PRETRAIN_JOB = (
    """# Training a Llama from its first step.
#   hethub plan job.yaml --explain --out plan.yaml         what it would take, without running anything
#   hethub size job.yaml --tokens 1T --deadline 60         which cluster would do it in time
#   hethub launch job.yaml --dry-run                       the command that starts it on the nodes of cluster.yaml
model: model.yaml
cluster: cluster.yaml
data:
  source: tokens                # made by: hethub tokenise TEXT… --tokenizer tokenizer.json --out corpus.bin
  path: corpus.bin
  tokenizer: tokenizer.json
  document_mask: true           # attention stays inside each document
# eval: {{every_steps: 500, batches: 8, data: {{source: text, path: held-out/}}}}   # loss on text that is not trained on
"""
    + _DEVICES
)

CONTINUE_JOB = (
    """# Training that goes on from a Hugging Face folder.
#   hethub plan job.yaml --explain                         what it would take, without running anything
#   hethub launch job.yaml --dry-run                       the command that starts it on the nodes of cluster.yaml
#   hethub export RUN_DIR --to FOLDER                      afterwards: a folder that transformers loads
model: 'hf:{model}'
cluster: cluster.yaml
data:
  source: jsonl                 # a file or a folder of them; the key `text` of every line
  path: data.jsonl
  tokenizer: '{model}/tokenizer.json'
  document_mask: true           # attention stays inside each document
"""
    + _DEVICES
)

CLUSTER_HEAD = """# {what}
# `hethub catalogue` lists accelerators by name; `hethub schema cluster` every key, links and racks among them.
"""

EXAMPLE_CLUSTER = (
    CLUSTER_HEAD.format(what="No accelerator was found on this machine: these nodes are an example. Write yours.")
    + """name: two-makers
network: null                   # 10.0.0.0/16: the job's network, in which every rank finds its interface
nodes:                          # in the order in which the launcher numbers the ranks
  - {name: nvidia, count: 1, accelerator: H100-SXM5-80GB, accelerators: 8, host_memory_gb: 2048, nics: 8, gbps_per_nic: 400,
     environment: null}         # /opt/hethub-cuda: the Python environment there, for `hethub launch`
  - {name: amd, count: 1, accelerator: MI300X, accelerators: 8, host_memory_gb: 2048, nics: 8, gbps_per_nic: 400,
     environment: null}
links:
  between_islands: {gbps_per_node: 400, latency_seconds: 2.0e-5}   # what the bridge may use of a node's interfaces
"""
)
