"""Which programs are tried: where they are from, how they are called, and what stands in for their data.

None of their code is here. FOLDER/repos/NAME holds what was brought of a repository at the commit that is named; what
is installed as a package is named with its version. Nothing here has a weight: a model is its configuration.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """One program. command: {repos} and {work} are filled in; it runs in `folder`.

    source: repository and commit, or package and version, with the file. data: what stands in for what it would fetch.
    paths: folders under FOLDER that it finds its packages in. values: what its questions for numbers get. environment:
    "NAME=value" of its process, {work} filled in. models: whose weights a real card needs, of `weights.MODELS`.
    """

    name: str
    source: str
    command: str
    data: str
    gpu: str = "T4"
    gpus: int = 1
    folder: str = "work"
    paths: tuple[str, ...] = ("site",)
    values: str = "answer"
    environment: tuple[str, ...] = ()
    models: tuple[str, ...] = ()


_TRANSFORMERS = "transformers 5.10.0.dev0 (macorisd/transformers-qwen3@4a42c1b083066a4ae212edd4bd8d28ff713c0088)"
_EXAMPLES = "pytorch/examples@77f55b912142e11fcfdf5b530231fb9c52f181e8"
_ACCELERATE = "huggingface/accelerate@16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
_PEFT = "huggingface/peft@5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40"
_DEEPSPEED = "deepspeedai/DeepSpeedExamples@45b4b7156c8794a3452a5a7d03dbd8d797068569"
_LIGHTNING = "Lightning-AI/pytorch-lightning@7f0c3436cd3f6ad3753125672024fc415cbcb414"
_SCRATCH = "rasbt/LLMs-from-scratch@28c65cdfbc3338e2e040016eea4b7fdf556e4d57"
_ALPACA = "400 random instructions as Alpaca; Qwen3-0.6B's configuration"
_HF = "{repos}/tf/examples/pytorch"
_TRAINER = "--do_train --output_dir {work}/out --report_to none"
_VISION = ("vision", "site")  # torchvision, whose compiled part does not load beside a CPU build of PyTorch

PROGRAMS = (
    Program(
        "run_clm", f"{_TRANSFORMERS}: examples/pytorch/language-modeling/run_clm.py",
        f"{_HF}/language-modeling/run_clm.py --model_name_or_path gpt2 --train_file train.txt --block_size 512 "
        f"--per_device_train_batch_size 4 --fp16 True {_TRAINER}",
        "2,000 lines of random words; GPT-2's configuration, a tokenizer of 4,000 pieces",
        models=("gpt2",),
    ),
    Program(
        "run_glue", f"{_TRANSFORMERS}: examples/pytorch/text-classification/run_glue.py",
        f"{_HF}/text-classification/run_glue.py --model_name_or_path bert-one --train_file pairs_train.csv "
        f"--validation_file pairs_validation.csv --max_seq_length 128 --per_device_train_batch_size 32 {_TRAINER}",
        "200 random pairs of sentences with a number each; a metric that says 0",
        models=("bert-one",),
    ),
    Program(
        "run_image_classification",
        f"{_TRANSFORMERS}: examples/pytorch/image-classification/run_image_classification.py",
        f"{_HF}/image-classification/run_image_classification.py --model_name_or_path vit --train_dir images/train "
        f"--train_val_split 0.2 --remove_unused_columns False --per_device_train_batch_size 16 {_TRAINER}",
        "80 images of noise; ViT-B/16's configuration", paths=_VISION,
        models=("vit",),
    ),
    Program(
        "run_summarization", f"{_TRANSFORMERS}: examples/pytorch/summarization/run_summarization.py",
        f"{_HF}/summarization/run_summarization.py --model_name_or_path t5 --train_file texts_train.json "
        "--validation_file texts_validation.json --source_prefix summarize: --per_device_train_batch_size 4 "
        f"{_TRAINER}",
        "200 random texts of 400 words; T5-base's configuration",
        models=("t5",),
    ),
    Program(
        "MetaMathQA", f"{_PEFT}: method_comparison/MetaMathQA/run.py",
        "{repos}/peft/method_comparison/MetaMathQA/run.py -v experiments/lora/llama-3.2-3B-rank32",
        "random questions and answers; Llama-3.2-3B's configuration", gpu="L4",
        folder="repos/peft/method_comparison/MetaMathQA", models=("meta-llama/Llama-3.2-3B",),
        environment=("PYTHONOPTIMIZE=1", "GIT_DIR={work}/git/.git"),  # it asserts a true model's first loss
    ),
    Program(
        "peft sft QLoRA", f"{_PEFT}: examples/sft/train.py",
        "{repos}/peft/examples/sft/train.py --model_name_or_path qwen3-0.6b --dataset_name sft --splits train,test "
        "--max_length 1024 --packing False --use_peft_lora True --lora_r 8 --lora_alpha 16 "
        "--lora_target_modules all-linear --use_4bit_quantization True --bnb_4bit_compute_dtype bfloat16 "
        "--use_nested_quant True --bf16 True --per_device_train_batch_size 4 --gradient_checkpointing True "
        "--dataset_text_field text --output_dir {work}/out --report_to none",
        "400 random conversations; Qwen3-0.6B's configuration", gpu="L4",
        models=("qwen3-0.6b",),
    ),
    Program(
        "TRL SFT", "trl 1.16.0: trl.scripts.sft",
        "-m trl.scripts.sft --model_name_or_path qwen3-0.6b --dataset_name sft --max_length 1024 "
        "--per_device_train_batch_size 4 --output_dir {work}/out --report_to none",
        "400 random conversations", gpu="L4",
        models=("qwen3-0.6b",),
    ),
    Program(
        "TRL DPO", "trl 1.16.0: trl.scripts.dpo",
        "-m trl.scripts.dpo --model_name_or_path qwen3-0.6b --dataset_name dpo --max_length 1024 "
        "--per_device_train_batch_size 2 --output_dir {work}/out --report_to none",
        "400 random preferences", gpu="A100-40GB",
        models=("qwen3-0.6b",),
    ),
    Program(
        "accelerate nlp_example", f"{_ACCELERATE}: examples/nlp_example.py",
        "{repos}/accelerate/examples/nlp_example.py --mixed_precision fp16",
        "random pairs of sentences under MRPC's name; a metric that says 0",
        models=("bert-base-cased",),
    ),
    Program(
        "Lightning transformer", f"{_LIGHTNING}: examples/pytorch/basics/transformer.py, lightning 2.6.6",
        "{repos}/pl/examples/pytorch/basics/transformer.py", "random words as WikiText-2",
    ),
    Program(
        "timm train", "huggingface/pytorch-image-models@aa4b5850c1543fa488abf260f18390eda46cf85d: train.py",
        "{repos}/pytorch-image-models/train.py --data-dir images --train-split train --val-split validation "
        "--model vit_base_patch16_224 --num-classes 2 -b 16 --workers 1 --amp --output out",
        "80 images of noise", paths=_VISION,
    ),
    Program(
        "diffusers LoRA", "huggingface/diffusers@58eb52c0803ea9af3abec60841c2a093bdf1f951: "
        "examples/text_to_image/train_text_to_image_lora.py",
        "{repos}/diffusers/examples/text_to_image/train_text_to_image_lora.py --pretrained_model_name_or_path sd15 "
        "--train_data_dir captioned --resolution 512 --train_batch_size 1 --gradient_checkpointing "
        "--mixed_precision fp16 --max_train_steps 10 --output_dir {work}/out",
        "40 images of noise; Stable Diffusion 1.5's configurations", paths=("repos/diffusers/src", *_VISION),
        models=("sd15",),
    ),
    Program(
        "nanoGPT", "karpathy/nanoGPT@3adf61e154c3fe3fca428ad6bc3818b27a3b8291: train.py",
        "{repos}/nanoGPT/train.py --dataset=random --batch_size=8 --gradient_accumulation_steps=1 --compile=False "
        "--dtype=float16 --eval_iters=1",
        "random tokens", folder="repos/nanoGPT",
    ),
    Program(
        "run_mlm", f"{_TRANSFORMERS}: examples/pytorch/language-modeling/run_mlm.py",
        f"{_HF}/language-modeling/run_mlm.py --model_name_or_path bert-base-cased --train_file train.txt "
        f"--max_seq_length 256 --per_device_train_batch_size 16 --bf16 True {_TRAINER}",
        "2,000 lines of random words; BERT-base's configuration", gpu="A100-40GB", models=("bert-base-cased",),
    ),
    Program(
        "run_generation", f"{_TRANSFORMERS}: examples/pytorch/text-generation/run_generation.py",
        f"{_HF}/text-generation/run_generation.py --model_type gpt2 --model_name_or_path gpt2 --length 20 "
        "--prompt words --num_return_sequences 4",
        "GPT-2's configuration", models=("gpt2",),
    ),
    Program(
        "TRL GRPO", "trl 1.16.0: trl.scripts.grpo",
        "-m trl.scripts.grpo --model_name_or_path qwen3-0.6b --dataset_name prompts --reward_funcs think_format_reward "
        "--per_device_train_batch_size 8 --num_generations 8 --max_completion_length 64 --output_dir {work}/out "
        "--report_to none",
        "400 random questions; Qwen3-0.6B's configuration", gpu="A100-40GB", models=("qwen3-0.6b",),
    ),
    Program(
        "TRL reward", "trl 1.16.0: trl.scripts.reward",
        "-m trl.scripts.reward --model_name_or_path qwen3-0.6b --dataset_name dpo --max_length 1024 "
        "--per_device_train_batch_size 2 --output_dir {work}/out --report_to none",
        "400 random preferences; Qwen3-0.6B's configuration", gpu="A100-40GB", models=("qwen3-0.6b",),
    ),
    Program(
        "Lightning fabric", f"{_LIGHTNING}: examples/fabric/language_model/train.py, lightning 2.6.6",
        "{repos}/pl/examples/fabric/language_model/train.py", "random words as WikiText-2",
    ),
    Program(
        "pytorch mnist", f"{_EXAMPLES}: mnist/main.py", "{repos}/examples/mnist/main.py",
        "2,000 random images as MNIST", folder="work/cwd", paths=_VISION,
    ),
    Program(
        "pytorch vae", f"{_EXAMPLES}: vae/main.py", "{repos}/examples/vae/main.py",
        "2,000 random images as MNIST", folder="work/cwd", paths=_VISION,
    ),
    Program(
        "pytorch dcgan", f"{_EXAMPLES}: dcgan/main.py", "{repos}/examples/dcgan/main.py --dataset fake --accel",
        "none: its own random numbers", folder="work/cwd", paths=_VISION,
    ),
    Program(
        "pytorch imagenet", f"{_EXAMPLES}: imagenet/main.py",
        "{repos}/examples/imagenet/main.py --dummy --arch resnet50 -b 32 -j 1 --gpu 0", "none: its own random numbers",
        folder="work/cwd", paths=_VISION,
    ),
    Program(
        "pytorch LSTM", f"{_EXAMPLES}: word_language_model/main.py",
        "{repos}/examples/word_language_model/main.py --data wikitext-2 --accel --use-optimizer", "random words",
        paths=("site",),
    ),
    Program(
        "pytorch Transformer", f"{_EXAMPLES}: word_language_model/main.py",
        "{repos}/examples/word_language_model/main.py --data wikitext-2 --accel --use-optimizer --model Transformer",
        "random words",
    ),
    Program(
        "minGPT chargpt", "karpathy/minGPT@37baab71b9abea1b76ab957409a1cc2fbfba8a26: projects/chargpt/chargpt.py",
        "{repos}/minGPT/projects/chargpt/chargpt.py --model.model_type=gpt2", "random words as input.txt",
        paths=("repos/minGPT", "site"),
    ),
    Program(
        "LLMs from scratch", f"{_SCRATCH}: ch05/10_llm-training-speed/00_orig.py",
        "{repos}/llms/ch05/10_llm-training-speed/00_orig.py", "random words; bytes as tiktoken's tokens",
        gpu="A100-40GB", paths=("stubs", "site"),
    ),
    Program(
        "LLMs from scratch, small", f"{_SCRATCH}: ch05/01_main-chapter-code/gpt_train.py",
        "{repos}/llms/ch05/01_main-chapter-code/gpt_train.py", "random words; bytes as tiktoken's tokens",
        paths=("stubs", "site"),
    ),
    Program(
        "pytorch FSDP2", f"{_EXAMPLES}: distributed/FSDP2/example.py", "{repos}/examples/distributed/FSDP2/example.py",
        "none: its own random numbers", gpu="H100", gpus=8, folder="repos/examples/distributed/FSDP2",
    ),
    Program(
        "pytorch FSDP + TP", f"{_EXAMPLES}: distributed/tensor_parallelism/fsdp_tp_example.py",
        "{repos}/examples/distributed/tensor_parallelism/fsdp_tp_example.py", "none: its own random numbers",
        gpu="H100", gpus=8, folder="repos/examples/distributed/tensor_parallelism",
    ),
    Program(
        "pytorch tensor parallel", f"{_EXAMPLES}: distributed/tensor_parallelism/tensor_parallel_example.py",
        "{repos}/examples/distributed/tensor_parallelism/tensor_parallel_example.py", "none: its own random numbers",
        gpu="H100", gpus=8, folder="repos/examples/distributed/tensor_parallelism",
    ),
    Program(
        "run_clm ZeRO-2", f"{_TRANSFORMERS}: examples/pytorch/language-modeling/run_clm.py, deepspeed 0.19.8",
        f"deepspeed --num_gpus 4 {_HF}/language-modeling/run_clm.py --model_name_or_path gpt2 --train_file train.txt "
        f"--block_size 512 --per_device_train_batch_size 4 --bf16 True --deepspeed zero2.json {_TRAINER}",
        "as run_clm; transformers' documented ZeRO-2 configuration", gpu="L4", gpus=4, paths=("ds", "site"),
    ),
    Program(
        "run_clm ZeRO-3", f"{_TRANSFORMERS}: examples/pytorch/language-modeling/run_clm.py, deepspeed 0.19.8",
        f"deepspeed --num_gpus 4 {_HF}/language-modeling/run_clm.py --model_name_or_path gpt2 --train_file train.txt "
        f"--block_size 512 --per_device_train_batch_size 4 --bf16 True --deepspeed zero3.json {_TRAINER}",
        "as run_clm; transformers' documented ZeRO-3 configuration", gpu="L4", gpus=4, paths=("ds", "site"),
    ),
    Program(
        "DeepSpeed ZeRO-3 offload",
        f"{_DEEPSPEED}: training/DeepSpeed-SuperOffload/finetune_zero3.py, deepspeed 0.19.8, wandb 0.31.0",
        "deepspeed --num_gpus 4 {repos}/DeepSpeedExamples/training/DeepSpeed-SuperOffload/finetune_zero3.py "
        "--model_name qwen3-0.6b --lr 1e-5 --batch_size 4 --max_length 2048 --activation_checkpointing "
        "--dataset_name tatsu-lab/alpaca --output_dir {work}/out --deepspeed_config zero3_offload.json",
        f"{_ALPACA}; the script's own ZeRO-offload configuration", gpu="L4", gpus=4, paths=("ds", "site"),
    ),
)  # fmt: skip
