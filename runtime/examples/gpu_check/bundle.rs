//! Programs and golden files, and float32 logits to compare with.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, ensure};
use gemma4_runtime::cpu::Cpu;
use gemma4_runtime::{LoadedProgram, Session, SessionOptions};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::compare::{Bound, Difference};
use crate::references::References;
use crate::subject;

/// Largest distance from float32 that is allowed, as a share of what transformers has in bfloat16.
const MAX_SHARE: f32 = 1.25;
/// Tokens of the text whose every beginning is read as a prompt.
const LONGEST: usize = 257;

/// Tokens of the trained model's prompt for tools that make programs slow: more than its window.
const QUICK: usize = 140;

/// The models of a bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Model {
    /// Random weights in the shape of 31B, as the checkpoint has them.
    Dense,
    /// The same, quantized by the default recipe.
    Quantized,
    /// The first, as llama.cpp quantizes it into a Q4_K_M file. A bundle may lack it.
    Gguf,
    /// Trained weights.
    Chat,
    /// The first, with some channels a thousand times the others.
    DensePlanted,
    /// The second, likewise.
    QuantizedPlanted,
    /// The third, likewise.
    ChatPlanted,
}

impl Model {
    pub(crate) const ALL: [Self; 7] = [
        Self::Dense,
        Self::Quantized,
        Self::Gguf,
        Self::Chat,
        Self::DensePlanted,
        Self::QuantizedPlanted,
        Self::ChatPlanted,
    ];

    /// Its name in a bundle.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Model::Dense => "tiny-31b",
            Model::Quantized => "tiny-31b-int4",
            Model::Gguf => "tiny-31b-q4_k_m",
            Model::Chat => "tiny-chat",
            Model::DensePlanted => "tiny-31b-planted",
            Model::QuantizedPlanted => "tiny-31b-int4-planted",
            Model::ChatPlanted => "tiny-chat-planted",
        }
    }

    /// The model whose references say how far bfloat16 is from float32. Weights that stand for the same
    /// numbers, rounded, have the same distances.
    pub(crate) fn bounded_as(self) -> Self {
        if self == Self::Gguf { Self::Dense } else { self }
    }

    /// Whether transformers can run these very weights.
    pub(crate) fn has_references(self) -> bool {
        self.bounded_as() == self
    }

    /// Whether it has planted channels: then only its logits are checked.
    pub(crate) fn is_planted(self) -> bool {
        matches!(self, Self::DensePlanted | Self::QuantizedPlanted | Self::ChatPlanted)
    }

    fn is_chat(self) -> bool {
        matches!(self, Self::Chat | Self::ChatPlanted)
    }
}

/// The directory.
pub(crate) struct Bundle {
    directory: PathBuf,
    /// What transformers computed for the models with random weights.
    pub(crate) tiny: Value,
    tensors: Vec<u8>,
    /// And for the trained one.
    pub(crate) chat: Value,
    /// What transformers computed for all of them on a GPU.
    pub(crate) references: Option<References>,
}

impl Bundle {
    pub(crate) fn open(directory: &Path) -> anyhow::Result<Self> {
        let golden = directory.join("golden");
        let json = |name: &str| -> anyhow::Result<Value> {
            Ok(serde_json::from_slice(&read(&golden.join(name).join("golden.json"))?)?)
        };
        Ok(Self {
            directory: directory.to_owned(),
            tiny: json("tiny-31b")?,
            tensors: read(&golden.join("tiny-31b/golden.safetensors"))?,
            chat: json("tiny-chat")?,
            references: References::open(&golden)?,
        })
    }

    /// Whether there are weights of a model.
    pub(crate) fn has(&self, model: Model) -> bool {
        self.file("weights", model.name(), "ptd").exists()
    }

    /// A program for a kernel set.
    pub(crate) fn program(
        &self,
        kernels: &str,
        model: Model,
    ) -> anyhow::Result<Arc<LoadedProgram>> {
        self.program_named(kernels, model.name(), model)
    }

    /// A model's program that lacks a fusion.
    pub(crate) fn program_without(
        &self,
        kernels: &str,
        model: Model,
        fusion: &str,
    ) -> anyhow::Result<Arc<LoadedProgram>> {
        self.program_named(kernels, &format!("{}-without-{fusion}", model.name()), model)
    }

    fn program_named(
        &self,
        kernels: &str,
        name: &str,
        model: Model,
    ) -> anyhow::Result<Arc<LoadedProgram>> {
        let program = self.file(&format!("programs/{kernels}"), name, "pte");
        let weights = self.file("weights", model.name(), "ptd");
        Ok(Arc::new(LoadedProgram::map(&program, &weights)?))
    }

    fn file(&self, folder: &str, name: &str, ending: &str) -> PathBuf {
        self.directory.join(folder).join(format!("{name}.{ending}"))
    }

    /// A golden tensor.
    pub(crate) fn tensor(&self, name: &str) -> anyhow::Result<Vec<f32>> {
        let tensors = SafeTensors::deserialize(&self.tensors)?;
        Ok(floats(&tensors.tensor(name)?))
    }
}

/// Numbers of a bfloat16 or float32 tensor.
pub(crate) fn floats(tensor: &TensorView<'_>) -> Vec<f32> {
    let bytes = tensor.data();
    match tensor.dtype() {
        Dtype::BF16 => bytes
            .chunks_exact(2)
            .map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

/// A text, and float32 logits after its tokens.
pub(crate) struct Passage {
    pub(crate) name: String,
    pub(crate) tokens: Vec<u32>,
    /// Tokens that are read as a prompt.
    pub(crate) prompt: usize,
    /// After the last token of the prompt, and after each one that follows.
    pub(crate) rows: Vec<Vec<f32>>,
    /// How far the device may be from them.
    pub(crate) bound: Bound,
}

impl Passage {
    /// How far the rows that a session computes are from float32.
    pub(crate) fn compare(&self, session: &mut Session) -> anyhow::Result<Difference> {
        let rows = subject::rows(session, &self.tokens, self.prompt)?;
        let pairs = self.rows.iter().zip(&rows);
        Ok(Difference::of(pairs.map(|(truth, row)| (truth.as_slice(), row.as_slice()))))
    }
}

/// What the CPU device computes for a model, in float32 on the same weights. The project's tests
/// compare that with transformers.
pub(crate) struct Truth {
    pub(crate) model: Model,
    pub(crate) cpu: Cpu,
    pub(crate) passages: Vec<Passage>,
    /// One text, with logits after every token.
    pub(crate) every: Passage,
}

impl Truth {
    /// Reads the passages on the CPU; only the beginnings of some if `quick`.
    pub(crate) fn new(
        bundle: &Bundle,
        model: Model,
        program: Arc<LoadedProgram>,
        quick: bool,
    ) -> anyhow::Result<Self> {
        program.verify_data(&|_, _| {})?;
        let cpu = Cpu::new(program)?;
        let mut session = Session::new(&cpu, SessionOptions::default())?;
        let mut passages = texts(bundle, model)?;
        if let Some(references) = &bundle.references {
            for passage in &mut passages {
                passage.bound = references.bound(model.bounded_as(), &passage.name)?;
            }
        }
        let bound = passages.iter().map(|p| p.bound).fold(Bound::default(), Bound::or);
        let mut tokens: Vec<u32> = passages.iter().rev().flat_map(|p| p.tokens.clone()).collect();
        tokens.truncate(LONGEST);
        ensure!(tokens.len() == LONGEST, "the golden texts have {} tokens", tokens.len());
        let mut every =
            Passage { name: "every".to_owned(), tokens, prompt: 1, rows: Vec::new(), bound };
        if quick {
            passages.retain(|p| matches!(p.name.as_str(), "p33" | "text 0"));
            for passage in &mut passages {
                if model.is_chat() {
                    passage.prompt = QUICK;
                }
                passage.tokens.truncate(passage.prompt + 3);
            }
            every.tokens.truncate(1);
        }
        for passage in passages.iter_mut().chain([&mut every]) {
            passage.rows = subject::rows(&mut session, &passage.tokens, passage.prompt)?;
        }
        Ok(Self { model, cpu, passages, every })
    }

    /// A passage to begin with where the text does not matter.
    pub(crate) fn any(&self) -> &Passage {
        self.passages.last().unwrap_or(&self.every)
    }
}

/// The golden texts of a model, without logits, and bounds of the golden files.
fn texts(bundle: &Bundle, model: Model) -> anyhow::Result<Vec<Passage>> {
    let text = |name: String, [prompt, answer]: [&Value; 2], [max, mean]: [&Value; 2]| {
        let (mut tokens, answer) = (ids(prompt), ids(answer));
        let prompt = tokens.len();
        tokens.extend(answer);
        let number = |value: &Value| value.as_f64().context("no distance of bfloat16");
        let (max, mean) = (MAX_SHARE * number(max)? as f32, number(mean)?);
        let bound = Bound { max, mean, kl: f64::INFINITY };
        Ok(Passage { name, tokens, prompt, rows: Vec::new(), bound })
    };
    if model.is_chat() {
        let texts = bundle.chat["text"].as_array().context("the golden file has no texts")?;
        let of = |(index, t): (usize, &Value)| {
            let bf16 = &t["bf16"];
            let bound = [&bf16["max_abs_diff"], &bf16["mean_abs_diff"]];
            text(format!("text {index}"), [&t["prompt_ids"], &t["output_ids"]], bound)
        };
        return texts.iter().enumerate().map(of).collect();
    }
    let prompts = bundle.tiny["prompts"].as_object().context("the golden file has no prompts")?;
    let of = |(name, p): (&String, &Value)| {
        let bf16 = &p["bf16"];
        let bound = [&bf16["last_max_abs_diff"], &bf16["last_mean_abs_diff"]];
        text(name.clone(), [&p["input_ids"], &p["greedy_ids"]], bound)
    };
    prompts.iter().map(of).collect()
}

/// Token ids of a golden file.
pub(crate) fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().into_iter().flatten();
    ids.filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read `{}`", path.display()))
}
