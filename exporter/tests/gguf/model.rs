//! Whole models: what a config becomes, and logits against transformers.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use gemma4_exporter::checkpoint::Checkpoint;
use gemma4_exporter::export::{Options, export};
use gemma4_exporter::gguf::Gguf;
use gemma4_exporter::model::Config;
use gemma4_exporter::output::Monitor;
use gemma4_exporter::source::ModelSource;
use gemma4_runtime::cpu::Cpu;
use gemma4_runtime::{LoadedProgram, Session, SessionOptions};
use safetensors::SafeTensors;

use crate::support::{File, Tensor, fixtures, model, u32, values};

fn exported(gguf: &Gguf) -> Arc<LoadedProgram> {
    let dir = tempfile::tempdir().unwrap();
    let files = export(gguf, &Options::default(), dir.path(), &Monitor::silent()).unwrap();
    Arc::new(LoadedProgram::open(&files.program, &files.data, &|_, _| {}).unwrap())
}

fn stops(config: &Config) -> Vec<u32> {
    let ids: BTreeSet<u32> = config.eos_token_ids.iter().copied().collect();
    ids.into_iter().collect()
}

#[test]
fn a_config_is_made_from_the_keys() {
    let (_dir, path) = model().write();
    let config = Config::parse(Gguf::open(path).unwrap().config_json()).unwrap();
    assert_eq!((config.vocab_size, config.hidden_size, config.intermediate_size), (64, 256, 4));
    assert_eq!((config.rms_norm_eps, config.final_logit_softcapping), (1e-6, Some(30.0)));
    assert_eq!((config.max_position_embeddings, config.num_attention_heads), (512, 4));
    assert_eq!((config.bos_token_id, stops(&config)), (Some(2), vec![1, 4]));
    let [sliding, full] = &config.layers[..] else { panic!("two layers") };
    assert_eq!((sliding.window, sliding.head_dim, sliding.num_key_value_heads), (Some(16), 32, 2));
    assert_eq!(
        (sliding.values_from_keys, sliding.rope.base, sliding.rope.rotated),
        (false, 1e4, 16)
    );
    assert_eq!((full.window, full.head_dim, full.num_key_value_heads), (None, 64, 1));
    assert_eq!((full.values_from_keys, full.rope.base, full.rope.rotated), (true, 1e6, 8));
}

#[test]
fn a_program_has_the_defaults_of_the_file() {
    let (_dir, path) = model().write();
    let program = exported(&Gguf::open(path).unwrap());
    let program = program.program();
    assert_eq!((program.text.bos_token, &program.text.stop_tokens[..]), (Some(2), &[1, 4][..]));
    assert_eq!((program.text.temperature, program.text.top_k, program.text.top_p), (0.5, 7, 0.95));
    assert_eq!((&*program.source.layout, &*program.source.recipe), ("gguf", "gguf F32"));
}

#[test]
fn a_head_in_the_file_and_all_values_are_used() {
    let mut file = model();
    file.tensors.push(Tensor::random("output.weight", &[64, 256]));
    file.tensors.push(Tensor::random("blk.1.attn_v.weight", &[64, 256]));
    let (_dir, path) = file.write();
    let gguf = Gguf::open(path).unwrap();
    assert!(!Config::parse(gguf.config_json()).unwrap().layers[1].values_from_keys);
    let program = exported(&gguf);
    let names: Vec<_> = program.program().weights.iter().map(|w| w.name.as_str()).collect();
    assert!(
        names.contains(&"lm_head.weight") && names.contains(&"layers.1.self_attn.v_proj.weight")
    );
}

/// Every number of rotated pairs, also where `rotated / half` is no float32.
#[test]
fn rotated_pairs_are_counted() {
    for (width, rotated) in [(64, 0), (64, 32), (58, 7), (58, 28), (46, 11), (46, 22)] {
        let mut file = model();
        file.set("gemma4.attention.key_length", u32(width));
        let half = u64::from(width / 2);
        let factors = (0..half).map(|pair| if pair < rotated { 1.0 } else { 1e30 });
        *file.tensor("rope_freqs.weight") = Tensor::f32("rope_freqs.weight", &[half], factors);
        let (_dir, path) = file.write();
        let config = Config::parse(Gguf::open(path).unwrap().config_json()).unwrap();
        assert_eq!(u64::from(config.layers[1].rope.rotated), rotated, "of {half}");
    }
}

/// The model in `count` parts, written as `x-0000I-of-0000N.gguf`.
fn split(file: &File, count: usize, dir: &Path) {
    let per_part = file.tensors.len().div_ceil(count);
    for (part, tensors) in file.tensors.chunks(per_part).enumerate() {
        let keys = if part == 0 { file.keys.clone() } else { Vec::new() };
        let mut part_file = File { keys, tensors: tensors.to_vec() };
        part_file.set("split.no", u32(part as u32));
        part_file.set("split.count", u32(count as u32));
        part_file.set("split.tensors.count", u32(file.tensors.len() as u32));
        let name = format!("x-{:05}-of-{count:05}.gguf", part + 1);
        std::fs::write(dir.join(name), part_file.bytes()).unwrap();
    }
}

#[test]
fn parts_of_a_split_model_are_one_model() {
    let dir = tempfile::tempdir().unwrap();
    let at = |part: u32| dir.path().join(format!("x-{part:05}-of-00003.gguf"));
    split(&model(), 3, dir.path());
    let (_dir, whole) = model().write();
    let whole = Gguf::open(whole).unwrap();
    for given in [1, 2, 3] {
        let gguf = Gguf::open(at(given)).unwrap();
        assert_eq!(gguf.names(), whole.names());
        assert_eq!(gguf.config_json(), whole.config_json());
        for name in gguf.names() {
            assert_eq!(values(&gguf, name), values(&whole, name), "{name}");
        }
    }
    let renamed = dir.path().join("renamed.gguf");
    std::fs::copy(at(1), &renamed).unwrap();
    let error = Gguf::open(&renamed).unwrap_err().to_string();
    assert!(error.contains("must be named `NAME-00001-of-00003.gguf`"), "{error}");
    std::fs::copy(at(3), at(2)).unwrap();
    let error = Gguf::open(at(1)).unwrap_err().to_string();
    assert!(error.contains("it says that it is part 3 of 3, where 2 of 3"), "{error}");
    std::fs::remove_file(at(2)).unwrap();
    let error = Gguf::open(at(1)).unwrap_err().to_string();
    assert!(error.contains("of which `x-00002-of-00003.gguf` is missing"), "{error}");
}

#[test]
fn an_f16_file_is_the_checkpoint_that_it_was_made_from() {
    let Some(fixtures) = fixtures("a GGUF file and its checkpoint") else { return };
    let gguf = Gguf::open(fixtures.join("gguf/tiny-31b-F16.gguf")).unwrap();
    let checkpoint = Checkpoint::open(fixtures.join("ckpt/tiny-31b")).unwrap();
    let wanted: Vec<&str> = checkpoint.names().collect();
    assert_eq!(gguf.names(), wanted);
    for name in wanted {
        assert_eq!(values(&gguf, name), values(&checkpoint, name), "{name}");
    }
    let (found, wanted) = (
        Config::parse(gguf.config_json()).unwrap(),
        Config::parse(checkpoint.config_json()).unwrap(),
    );
    assert_eq!(found.layers, wanted.layers);
    assert_eq!(
        (found.bos_token_id, found.rms_norm_eps, found.final_logit_softcapping),
        (wanted.bos_token_id, wanted.rms_norm_eps, wanted.final_logit_softcapping)
    );
    // generation_config.json of the checkpoint has 50 and 106, too.
    assert_eq!(stops(&found), [1, 50, 106]);
}

#[test]
fn logits_are_those_of_transformers() {
    let Some(fixtures) = fixtures("logits of GGUF files") else { return };
    for (file, golden) in [("F16", "tiny-31b"), ("Q4_K_M", "tiny-31b-Q4_K_M")] {
        let gguf = Gguf::open(fixtures.join(format!("gguf/tiny-31b-{file}.gguf"))).unwrap();
        let device = Cpu::new(exported(&gguf)).unwrap();
        let mut session = Session::new(&device, SessionOptions::default()).unwrap();
        let golden = fixtures.join("golden").join(golden).join("golden.safetensors");
        let golden = std::fs::read(golden).unwrap();
        let golden = SafeTensors::deserialize(&golden).unwrap();
        let words = |name: &str| golden.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
        for prompt in ["p1", "p5", "p31", "p33", "p64", "p200"] {
            let ids: Vec<u32> = words(&format!("prompt.{prompt}.input_ids"))
                .into_iter()
                .map(u32::from_le_bytes)
                .collect();
            let wanted = words(&format!("prompt.{prompt}.last_logits_f32"));
            let worst = |logits: Vec<f32>| {
                assert_eq!(logits.len(), wanted.len());
                let wanted = wanted.iter().map(|bytes| f32::from_le_bytes(*bytes));
                wanted.zip(logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
            };
            session.reset();
            ids.iter().for_each(|id| session.decode(*id).unwrap());
            let decoded = worst(session.logits().unwrap());
            session.reset();
            session.prefill(&ids).unwrap();
            let prefilled = worst(session.logits().unwrap());
            assert!(decoded <= 1e-3 && prefilled <= 1e-3, "{file} {prompt}: {decoded} {prefilled}");
        }
    }
}
