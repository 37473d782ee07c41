"""The public names of the TorchTitan integration, which configs and scripts use."""

from .experiments.experiment import TokenLoss as TokenLoss
from .model.experts import RecomputingTritonExperts as RecomputingTritonExperts
from .model.experts import TritonExperts as TritonExperts
from .model.models import DeepSeekV2Lite as DeepSeekV2Lite
from .model.models import RegisteredModel as RegisteredModel
from .model.models import TinyQwen3MoE as TinyQwen3MoE
from .model.models import TrainedModel as TrainedModel
from .model.overrides import LoopExperts as LoopExperts
from .rl.rl_experiment import CountingTask as CountingTask
from .rl.rl_experiment import GRPOTokenLoss as GRPOTokenLoss
from .rl.rl_experiment import Task as Task
from .rl.rl_run import CrossEntropyTokenLoss as CrossEntropyTokenLoss
from .trainer.memory import estimate_memory as estimate_memory
from .trainer.settings import TrainerSettings as TrainerSettings
from .trainer.trainer import RoutePackTrainer as RoutePackTrainer
