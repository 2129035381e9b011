from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_novel import NovelConfig
from .layers_novel import NovelBlock


class NovelForCausalLM(PreTrainedModel):
    config_class = NovelConfig
    base_model_prefix = "model"
    _no_split_modules = ("NovelBlock",)

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(NovelBlock(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, value):
        self.embed = value

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, **ignored):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return CausalLMOutput(logits=self.head(x))
