//! What a checkpoint's generation_config.json recommends.

use serde::Deserialize;

use crate::{Error, Result};

/// Sampling defaults and special ids.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// 0 where the file says `do_sample: false`.
    pub temperature: f32,
    /// 0 for all.
    pub top_k: u32,
    /// In `(0, 1]`.
    pub top_p: f32,
    /// First token of a text.
    pub bos_token_id: Option<u32>,
    /// Ids that end a text.
    pub eos_token_ids: Vec<u32>,
}

#[derive(Default, Deserialize)]
struct File {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    bos_token_id: Option<u32>,
    eos_token_id: Option<Ids>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

impl Generation {
    /// Reads the file's text. What it leaves out is as Gemma's model card recommends:
    /// temperature 1, top_k 64, top_p 0.95.
    ///
    /// # Errors
    /// [`Error::GenerationConfig`].
    pub fn parse(json: Option<&str>) -> Result<Self> {
        let file: File = match json {
            Some(json) => serde_json::from_str(json)
                .map_err(|e| Error::GenerationConfig { why: e.to_string() })?,
            None => File::default(),
        };
        let temperature = file.temperature.unwrap_or(1.0);
        let top_p = file.top_p.unwrap_or(0.95);
        let in_range = temperature.is_finite() && temperature >= 0.0 && top_p > 0.0 && top_p <= 1.0;
        if !in_range {
            let why = format!("temperature {temperature} or top_p {top_p} is out of range");
            return Err(Error::GenerationConfig { why });
        }
        Ok(Self {
            temperature: if file.do_sample == Some(false) { 0.0 } else { temperature },
            top_k: file.top_k.unwrap_or(64),
            top_p,
            bos_token_id: file.bos_token_id,
            eos_token_ids: match file.eos_token_id {
                None => Vec::new(),
                Some(Ids::One(id)) => vec![id],
                Some(Ids::Many(ids)) => ids,
            },
        })
    }
}
