"""Hugging Face's Trainer, with the extra `hf`. Nothing is downloaded.

Alone it just trains:           python examples/hf_trainer.py
Two learners train one model:   atoll train examples/hf_trainer.py --learners 2 --steps 200
The global model is in the folder atoll-hf then, and loads back:   python examples/hf_trainer.py atoll-hf
"""

import argparse
import inspect
import sys

import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from atoll.integrations.hf import joined

alphabet = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
letters = Tokenizer(models.BPE(alphabet, []))
letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="Ā")
text = tokenizer(inspect.getsource(argparse))["input_ids"]
windows = [{"input_ids": text[at : at + 64]} for at in range(0, len(text) - 64, 64)]

hf.set_seed(0)
config = hf.GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = hf.AutoModelForCausalLM.from_pretrained(sys.argv[1]) if sys.argv[1:] else hf.GPT2LMHeadModel(config)
trainer = hf.Trainer(
    model,
    hf.TrainingArguments("atoll-hf", max_steps=60, learning_rate=1e-3, include_num_input_tokens_seen="all"),
    data_collator=hf.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    train_dataset=windows[:-100],
    eval_dataset=windows[-100:],
    processing_class=tokenizer,
)
if not sys.argv[1:]:
    with joined(trainer, save_to="atoll-hf"):
        trainer.train()
print("validation loss", trainer.evaluate()["eval_loss"])
