"""Fine-tune a few layers of a classifier. Runs as it stands on one process or under `accelerate launch`:

    python docs/examples/train.py --model bert-base-cased --data my_task/ --output out
    accelerate launch --config_file examples/accelerate/fsdp2.yaml docs/examples/train.py --model ... --data ...

`--data` is a folder with train.parquet and validation.parquet, each with the columns `text` and `label`.
"""

import argparse

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from peft_surgical import StratifiedConfig, SurgicalConfig, rank_layers, shard_by_layer
from peft_surgical.distributed import this_process


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output", required=True)
parser.add_argument("--method", choices=["surgical", "stratified", "head", "lora"], default="surgical")
parser.add_argument("--top-k", type=int, default=5)
parser.add_argument("--epochs", type=float, default=3)
parser.add_argument("--batch-size", type=int, default=16, help="on each process")
parser.add_argument("--lr", type=float, default=5e-5)
parser.add_argument("--optim", default="adamw_torch")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

splits = {name: f"{args.data}/{name}.parquet" for name in ("train", "validation")}
dataset = load_dataset("parquet", data_files=splits)
labels = sorted(set(dataset["train"]["label"]))
tokenizer = AutoTokenizer.from_pretrained(args.model)
dataset = dataset.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=128), batched=True)
dataset = dataset.remove_columns(["text"]).rename_column("label", "labels")
collator = DataCollatorWithPadding(tokenizer)

process = this_process()
set_seed(0)  # every process draws the same head
model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=len(labels)).to(process.device)

if args.method == "surgical":
    # every process scores its share of the samples; all of them arrive at the same ranking
    ranking = rank_layers(model, dataset["train"], num_samples=100, data_collator=collator, progress=False)
    if process.is_main_process:
        print(ranking)
    config = SurgicalConfig(task_type="SEQ_CLS", ranking=ranking, top_k=args.top_k)
elif args.method == "stratified":
    config = StratifiedConfig(task_type="SEQ_CLS", n1=0.2, n2=0.4, r=8, lora_alpha=16)
elif args.method == "head":
    config = StratifiedConfig(task_type="SEQ_CLS", strata=[{"layers": "all", "tune": "frozen"}])
else:
    config = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16)
model = get_peft_model(model, config)
if process.is_main_process and args.method != "lora":
    print(model.tuning_report())

# after the ranking, for from here on ZeRO-3 shards models as they are made
training_arguments = TrainingArguments(
    args.output,
    num_train_epochs=args.epochs,
    per_device_train_batch_size=args.batch_size,
    learning_rate=args.lr,
    optim=args.optim,
    weight_decay=0.01,
    eval_strategy="epoch",
    save_strategy="epoch",
    ddp_find_unused_parameters=False,  # all that is trained gets a gradient
    report_to=[],
    seed=0,
)
trainer = Trainer(
    model,
    training_arguments,
    train_dataset=dataset["train"],
    eval_dataset=dataset["validation"],
    data_collator=collator,
)
shard_by_layer(trainer.accelerator, model)  # for FSDP
trainer.train(resume_from_checkpoint=args.resume)
trainer.save_model(f"{args.output}/adapter")  # gathers sharded weights; the first process writes
process.wait_for_everyone()
process.destroy_process_group()  # or its threads may still run when Python ends, and crash
